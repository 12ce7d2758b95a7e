"""Hidden states and their gradients on their way between pipeline stages, beside the passes. Knows no order of passes.

On CPUs messages travel by gloo, between GPUs by NCCL, which wants both ends of a pair to post theirs in one order: the
caller's part. Every wait has the group's deadline.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.schedules import Action, Handover

AHEAD = 2  # posts whose messages may still be on their way out: their tensors stay until then


class Transfers:
    """The messages of one run through the stages, as one of them sends and receives them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._arriving: dict[Action, tuple[Handover, dist.Work, Tensor]] = {}
        self._leaving: deque[list[tuple[Handover, dist.Work, Tensor]]] = deque()

    def post(self, messages: Sequence[tuple[Handover, Tensor]]) -> None:
        """Begin to send and to receive. Each comes with a contiguous tensor: what is sent, or room for what comes."""
        if not messages:
            return
        here = self._ranks.rank
        operations = [
            dist.P2POp(dist.isend, tensor, group=self._ranks.group, group_peer=handover.receiver)
            if handover.sender == here
            else dist.P2POp(dist.irecv, tensor, group=self._ranks.group, group_peer=handover.sender)
            for handover, tensor in messages
        ]
        with self._naming(messages[0][0]):
            works = dist.batch_isend_irecv(operations)
        if len(works) == 1:
            works = works * len(operations)  # NCCL joins them
        posted = [(handover, work, tensor) for (handover, tensor), work in zip(messages, works, strict=True)]
        self._arriving |= {each[0].action: each for each in posted if each[0].receiver == here}
        self._leaving.append([each for each in posted if each[0].sender == here])
        while len(self._leaving) > AHEAD:
            self._wait(self._leaving.popleft())

    def take(self, action: Action) -> Tensor:
        """The tensor that has come for an action; waits for it. Raises CollectiveError where it does not come."""
        posted = self._arriving.pop(action)
        self._wait([posted])
        return posted[2]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._leaving:
            self._wait(self._leaving.popleft())

    def _wait(self, posted: Sequence[tuple[Handover, dist.Work, Tensor]]) -> None:
        for handover, work, _ in posted:
            with self._naming(handover):
                work.wait()

    @contextmanager
    def _naming(self, handover: Handover) -> Iterator[None]:
        """Turn what gloo and NCCL raise into an error with the stage at the other end."""
        try:
            yield
        except RuntimeError as error:
            way = "to" if handover.sender == self._ranks.rank else "from"
            peer = handover.receiver if way == "to" else handover.sender
            what = "hidden states" if handover.action.kind == "F" else "gradients"
            raise CollectiveError(
                f"{what} of micro-batch {handover.action.microbatch} {way} pipeline stage {peer} of "
                f"{self._ranks.name} did not arrive: {error}"
            ) from error
