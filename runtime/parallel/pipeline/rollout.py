"""Forward passes of generation through the stages of a pipeline, as one of them makes them. Knows no cache, no request.

Every stage has the same sequences, and each the keys and values of its own layers. Hidden states go from stage to
stage; the last one draws, and tells all others what. A stage does not wait for what it has sent to be used: while a
pass is on later stages, it makes the next one, of other sequences. Where a stage has several chunks of layers, passes
begin before those before them have gone through all chunks (`turns`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.pipeline.schedules import Action, Handover
from realgraph.runtime.parallel.pipeline.stage import PipelineStage, stage_of, walk
from realgraph.runtime.parallel.pipeline.transfers import Transfers
from realgraph.runtime.parallel.pipeline.turns import RolloutTurns

Drawn = tuple[Tensor, Tensor]  # tokens [n] int64, and their log-probabilities [n]
Around = Callable[[int], AbstractContextManager[None]]  # of a pass through a chunk, by the chunk's number
_DRAWS_TAG = 1  # hidden states have tag 0


@dataclass(eq=False)
class Draws:
    """Tokens [n] and log-probabilities [n] that were drawn for n sequences, perhaps still on their way."""

    result: Drawn | None = None  # None until the pass has gone through all chunks here
    works: Sequence[dist.Work] = ()
    stages: str = ""

    def take(self) -> tuple[list[int], list[float]]:
        """Tokens [n] and their log-probabilities [n]; waits for them. Raises CollectiveError where they don't come."""
        assert self.result is not None, "the pass that they are drawn from has not ended"
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise CollectiveError(
                    f"the tokens that the last pipeline stage of {self.stages} draws did not arrive: {error}"
                ) from error
        tokens, logprobs = self.result
        return tokens.long().tolist(), logprobs.tolist()


@dataclass(eq=False)
class StagedPass:
    """A forward pass of n sequences. tokens, positions: [n, q] int64, which nobody changes until it has ended. given:
    to every layer. around: entered for each chunk."""

    tokens: Tensor
    positions: Tensor
    given: Mapping[str, object]
    around: Around
    before: Sequence[Callable[[int], None]] = ()  # to do before each chunk
    states: Tensor | None = None  # [n, q, hidden] behind all layers, normed, in the last stage once the pass has ended
    ended: bool = False  # it has gone through all chunks here
    at_end: list[Callable[[], None]] = field(default_factory=list)


class StagedRollout:
    """The passes of one stage's part of a network. Making it is collective over the stages."""

    def __init__(self, network: Any, stage: PipelineStage) -> None:
        self._network, self._stage = network, stage
        self.layers = tuple(number for chunk in stage.chunks for number in chunk.layers)  # those that are here
        self._hidden: int = network.config.hidden_size
        self._dtype: torch.dtype = next(network.parameters()).dtype
        self._transfers = Transfers(stage.ranks)
        self._turns = RolloutTurns(stage.pipe, stage.ranks.rank)
        self._passes: dict[int, StagedPass | Callable[[int], None]] = {}  # that are under way, by number
        self._before: list[Callable[[int], None]] = []
        self._made: Tensor | None = None  # by the newest pass through a chunk
        # the first use of a group of GPUs takes all of its members, and neighbours alone talk first
        stage.ranks.add(torch.zeros(1, device=stage.ranks.device))

    @property
    def lanes(self) -> int:
        """Passes that can be on their way at a time: one a stage."""
        return self._stage.pipe.stages

    def chunk_layers(self, chunk: int) -> range:
        """The numbers of a chunk's layers."""
        return self._stage.chunks[chunk].layers

    def begin(self, one: StagedPass | Callable[[int], None]) -> None:
        """Begin a pass, or what is done in place of one, by chunk, where others make one alone. Collective over the
        stages."""
        if isinstance(one, StagedPass):
            one.before, self._before = self._before, []
        self._passes[self._turns.begun] = one
        self._run(self._turns.begin())

    def before_next(self, work: Callable[[int], None]) -> None:
        """Do something for each chunk, behind all passes that have begun and before the next one."""
        self._before.append(work)

    def end(self) -> None:
        """Take all passes that have begun through all chunks. Collective over the stages."""
        self._run(self._turns.end())

    def expect(self) -> None:
        """To be called before a collective of all stages between two passes: no stage waits for this one then."""
        self._run(self._turns.returns())

    def draw(self, one: StagedPass, how: Callable[[Tensor], Drawn]) -> Draws:
        """Draw for the sequences of a pass that has begun, when it ends: on every stage the same. how: from the logits
        [n, V] for the token after each newest one; under tensor parallelism from this rank's part."""
        draws = Draws(stages=self._stage.ranks.name)

        def at_end() -> None:
            drawn = None if one.states is None else how(self._logits(one.states))
            self.share(drawn, len(one.tokens), draws)

        if one.ended:
            at_end()
        else:
            one.at_end.append(at_end)
        return draws

    def share(self, drawn: Drawn | None, n: int, draws: Draws) -> None:
        """Tokens that the last stage draws for n sequences, to every stage. Collective over the stages, of which none
        waits for another here."""
        ranks, last = self._stage.ranks, self._stage.last
        if drawn is None:
            result = torch.empty((2, n), dtype=torch.float64)
            works = [dist.irecv(result, group=ranks.group, group_src=last, tag=_DRAWS_TAG)]
        else:
            result = torch.stack([part.double() for part in drawn]).cpu()
            works = [dist.isend(result, group=ranks.group, group_dst=to, tag=_DRAWS_TAG) for to in range(last)]
        draws.result, draws.works = (result[0], result[1]), [work for work in works if work is not None]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._transfers.finish()

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._network.lm_head(states[:, -1])
        cap = getattr(self._network.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _run(self, turns: Iterable[Action | Handover]) -> None:
        here, transfers = self._stage.ranks.rank, self._transfers
        for turn in turns:
            if isinstance(turn, Action):
                self._made = self._through(turn)
            elif turn.sender == here:
                if self._made is not None:
                    transfers.post([(turn, self._made.contiguous())])
            elif isinstance(one := self._passes[turn.action.microbatch], StagedPass):
                device = one.tokens.device
                room = torch.empty((*one.tokens.shape, self._hidden), dtype=self._dtype, device=device)
                transfers.post([(turn, room)])

    def _through(self, action: Action) -> Tensor | None:
        """A pass through a chunk: the states behind it; None for what is done in place of one."""
        here, number = self._stage.ranks.rank, action.chunk
        chunk, last = self._stage.chunks[number], number + 1 == self._stage.pipe.chunks
        one = self._passes.pop(action.microbatch) if last else self._passes[action.microbatch]
        if not isinstance(one, StagedPass):
            one(number)
            return None
        for work in one.before:
            work(number)
        hidden = self._network.model.embed_tokens(one.tokens) if chunk.first else self._transfers.take(action)
        with one.around(number):
            out = walk(self._network.model, chunk, (hidden, one.positions), one.given)
        if last:
            one.states, one.ended = out if here == self._stage.last else None, True
            for call in one.at_end:
                call()
        return out


def staged_rollout(network: nn.Module) -> StagedRollout | None:
    """The passes of a network that was cut to a stage."""
    stage = stage_of(network)
    return None if stage is None else StagedRollout(network, stage)
