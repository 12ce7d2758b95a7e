"""Micro-batches through the stages of a pipeline, as one of them takes them: passes in order, messages beside them.

Knows no model: the passes are the caller's. All stages know every micro-batch, so that shapes need no handover.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.schedules import Action, Pipe, PipelineTick, forward_ticks, step_ticks
from realgraph.runtime.parallel.pipeline.transfers import Transfers


@dataclass(frozen=True)
class StagePasses:
    """The passes of one stage.

    room: memory for the hidden states of a micro-batch, or their gradient, as this worker has them. forward: of a
    micro-batch through a chunk, from the hidden states that came (None in the first chunk of all): hidden states, or,
    in the last chunk of all, what is to be differentiated. backward: from an output, and its gradient where that came.
    """

    room: Callable[[int], Tensor]
    forward: Callable[[Action, Tensor | None], Tensor]
    backward: Callable[[Action, Tensor, Tensor | None], None]


class StageExecutor:
    """A pipeline, as one of its stages sees it. ranks: the stages, one of each, in order."""

    def __init__(self, pipe: Pipe, ranks: Ranks) -> None:
        self.pipe = pipe
        self.ranks = ranks
        # the first use of a group of GPUs takes all of its members, and neighbours alone talk first
        ranks.add(torch.zeros(1, device=ranks.device))

    def infer(self, microbatches: int, passes: StagePasses) -> None:
        """Forward passes of so many micro-batches. Collective over the stages."""
        self._run(forward_ticks(self.pipe, microbatches), passes, keep=False)

    def train(self, microbatches: int, passes: StagePasses) -> None:
        """Forward and backward passes, 1F1B or interleaved. Collective over the stages."""
        self._run(step_ticks(self.pipe, microbatches), passes, keep=True)

    def _run(self, ticks: tuple[PipelineTick, ...], passes: StagePasses, *, keep: bool) -> None:
        here, transfers = self.ranks.rank, Transfers(self.ranks)
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # of begun passes: input and output
        for tick in ticks:
            action, made = tick.actions[here], None
            if action is not None and action.kind == "F":
                made = self._forward(action, transfers, passes, kept if keep else None)
            elif action is not None:
                made = self._backward(action, transfers, passes, kept)
            moves = []
            for handover in tick.handovers:
                if handover.sender == here:
                    assert made is not None
                    moves.append((handover, made.contiguous()))
                elif handover.receiver == here:
                    moves.append((handover, passes.room(handover.action.microbatch)))
            transfers.post(moves)
        transfers.finish()

    def _forward(
        self,
        action: Action,
        transfers: Transfers,
        passes: StagePasses,
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] | None,
    ) -> Tensor:
        first = self.pipe.before(self.ranks.rank, action.chunk) is None
        arrived = None if first else transfers.take(action)
        if kept is None:
            return passes.forward(action, arrived)
        if arrived is not None:
            arrived.requires_grad_()
        made = passes.forward(action, arrived)
        kept[action.microbatch, action.chunk] = (arrived, made)
        return made.detach()

    def _backward(
        self,
        action: Action,
        transfers: Transfers,
        passes: StagePasses,
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]],
    ) -> Tensor | None:
        last = self.pipe.next(self.ranks.rank, action.chunk) is None
        grad = None if last else transfers.take(action)
        arrived, made = kept.pop((action.microbatch, action.chunk))
        passes.backward(action, made, grad)
        return None if arrived is None else arrived.grad
