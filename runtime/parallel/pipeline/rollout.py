"""Forward passes of generation through the stages of a pipeline, as one of them makes them. Knows no cache, no request.

Every stage has the same sequences, and each the keys and values of its own layers. Hidden states go from stage to
stage; the last one draws, and tells all others what. A stage does not wait for what it has sent to be used: while a
pass is on later stages, it makes the next one, of other sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realgraph.runtime.parallel.pipeline.schedules import Action, Handover
from realgraph.runtime.parallel.pipeline.stage import PipelineStage, stage_of, walk
from realgraph.runtime.parallel.pipeline.transfers import Transfers
from realgraph.runtime.parallel.rendezvous import CollectiveError

Drawn = tuple[Tensor, Tensor]  # tokens [n] int64, and their log-probabilities [n]
_DRAWS_TAG = 1  # hidden states have tag 0


class Draws:
    """Tokens [n] and log-probabilities [n] that were drawn for n sequences, perhaps still on their way."""

    def __init__(self, told: Drawn, works: Sequence[dist.Work] = (), stages: str = "") -> None:
        self._told, self._works, self._stages = told, works, stages

    def take(self) -> tuple[list[int], list[float]]:
        """Tokens [n] and their log-probabilities [n]; waits for them. Raises CollectiveError where they don't come."""
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise CollectiveError(
                    f"the tokens that the last pipeline stage of {self._stages} draws did not arrive: {error}"
                ) from error
        tokens, logprobs = self._told
        return tokens.long().tolist(), logprobs.tolist()


class StagedRollout:
    """The passes of one stage's part of a network. Making it is collective over the stages."""

    def __init__(self, network: Any, stage: PipelineStage) -> None:
        self._network, self._stage = network, stage
        self.layers = tuple(number for chunk in stage.chunks for number in chunk.layers)  # those that are here
        self._hidden: int = network.config.hidden_size
        self._dtype: torch.dtype = next(network.parameters()).dtype
        self._transfers = Transfers(stage.ranks)
        # the first use of a group of GPUs takes all of its members, and neighbours alone talk first
        stage.ranks.add(torch.zeros(1, device=stage.ranks.device))

    @property
    def lanes(self) -> int:
        """Passes that can be on their way at a time: one a stage, where each stage's layers follow each other."""
        return self._stage.pipe.stages if self._stage.pipe.chunks == 1 else 1

    def run(self, tokens: Tensor, positions: Tensor, given: Mapping[str, object]) -> Tensor | None:
        """The normed states [n, q, hidden] behind all layers, in the last stage. tokens, positions: [n, q] int64.
        given: to every layer. Collective over the stages."""
        here, pipe, transfers = self._stage.ranks.rank, self._stage.pipe, self._transfers
        out: Tensor | None = None
        for number, chunk in enumerate(self._stage.chunks):
            if (before := pipe.before(here, number)) is None:
                hidden = self._network.model.embed_tokens(tokens)
            else:
                action = Action("F", 0, number)
                room = torch.empty((*tokens.shape, self._hidden), dtype=self._dtype, device=tokens.device)
                transfers.post([(Handover(before[0], here, action), room)])
                hidden = transfers.take(action)
            out = walk(self._network.model, chunk, (hidden, positions), given)
            if (after := pipe.next(here, number)) is not None:
                transfers.post([(Handover(here, after[0], Action("F", 0, after[1])), out.contiguous())])
        return out if here == self._stage.last else None

    def logits(self, tokens: Tensor, positions: Tensor, given: Mapping[str, object]) -> Tensor | None:
        """[n, V] for the token after each of the newest ones [n, 1], in the last stage; under tensor parallelism this
        rank's part. Collective over the stages."""
        states = self.run(tokens, positions, given)
        if states is None:
            return None
        logits: Tensor = self._network.lm_head(states[:, -1])
        cap = getattr(self._network.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def share(self, drawn: Drawn | None, n: int) -> Draws:
        """Tokens that the last stage draws for n sequences, on every stage. Collective over the stages, of which none
        waits for another here."""
        ranks, last = self._stage.ranks, self._stage.last
        if drawn is None:
            told = torch.empty((2, n), dtype=torch.float64)
            works = [dist.irecv(told, group=ranks.group, group_src=last, tag=_DRAWS_TAG)]
        else:
            told = torch.stack([part.double() for part in drawn]).cpu()
            works = [dist.isend(told, group=ranks.group, group_dst=to, tag=_DRAWS_TAG) for to in range(last)]
        return Draws((told[0], told[1]), [work for work in works if work is not None], ranks.name)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._transfers.finish()


def staged_rollout(network: nn.Module) -> StagedRollout | None:
    """The passes of a network that was cut to a stage."""
    stage = stage_of(network)
    return None if stage is None else StagedRollout(network, stage)
