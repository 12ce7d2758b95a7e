"""Prefills of the running sequences: which tokens of which in one forward pass, and what samples of a prompt share.

The first sequence of each prompt goes ahead; others of that prompt take what it stored, by page: a page that both hold
is there already, another is copied. A sequence that lost its cache (new weights, no memory) is prefilled as a longer
prompt. Where a walk's prefill returns logits (`CachedModel.prefill_returns_logits`), it takes in the newest token, too,
so that the first draw of all samples of a prompt needs no decode step; another prefills up to it.

Where caches outlive a change of weights, samples of a prompt share only what the newest weights have computed.

A prefill holds up all that decode, so requests are not taken in one by one as places become free (`AdmissionDelay`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from realgraph.planner.costs.generate.generate import PREFILL_STEPS
from realgraph.runtime.attention.pages import PAGE_TOKENS, pages_for
from realgraph.runtime.generate.cached_model import CachedModel
from realgraph.runtime.generate.slots import PrefillLogits, RunningSequence, watched
from realgraph.runtime.parallel.experts.kept import RouteNotes

MOST_DELAY = 8  # decode steps for which the last requests wait for others


def shared_pages(request_tokens: int) -> int:
    """Pages of a prompt of so many tokens that its samples can share: they are full, and hold no sample's newest."""
    return (request_tokens - 1) // PAGE_TOKENS


class AdmissionDelay:
    """The wait of requests that could run for more of them: until the tokens that they have not drawn meanwhile would
    take as long as the prefill that is saved, as one rents skis until the rent has reached their price. So both cost
    about the same. Where nothing else waits, a batch may end with those that do: they wait for few steps.

    Counted in decode steps, which all workers of a session have in common, not in seconds.
    """

    def __init__(self) -> None:
        self._lost_steps = 0.0

    def ends(self, could_join: int, waiting: int, running: int) -> bool:
        """To be asked before each decode step: true where requests begin now. could_join: of those that wait."""
        if could_join:
            least = PREFILL_STEPS / MOST_DELAY if could_join == waiting else 0.0
            self._lost_steps += max(could_join / (could_join + running), least)
        if running and self._lost_steps < PREFILL_STEPS:
            return False
        self._lost_steps = 0.0
        return True


class Prefill:
    """Prefills over one model's cache; budget: tokens of one forward pass, padding included. notes: of the experts of
    tokens, where they are kept."""

    def __init__(self, model: CachedModel, budget: int, notes: RouteNotes | None = None) -> None:
        self._model, self._budget, self._notes = model, budget, notes

    def logits(
        self, pending: Sequence[RunningSequence], running: Sequence[RunningSequence], version: int
    ) -> Tensor | None:
        """Bring every one of `pending` to where it can decode. running: they, and all others that they may share with.
        version: of the weights.

        Returns their logits [k, V], where prefills return them, else None.
        """
        if not pending:
            return None
        donors = {s.key: s for s in running if s.cached >= len(s.request.prompt) - 1 and s.shares(version)}
        leaders, followers = [], []
        for sequence in pending:
            sequence.cached = min(sequence.cached, len(sequence.tokens) - 1)
            if not sequence.cached:
                sequence.began = version
            if sequence.began != version:
                leaders.append(sequence)
                continue
            donor = donors.setdefault(sequence.key, sequence)
            if not sequence.cached and donor is not sequence and donor.request.prompt == sequence.request.prompt:
                followers.append((sequence, donor))
            else:
                leaders.append(sequence)
        found = PrefillLogits()
        self._forward(leaders, found)
        self._take_over(followers, found)
        self._forward([s for s, _ in followers if s.request.id not in found.at], found)
        if not self._model.prefill_returns_logits:
            return None
        return torch.cat(found.logits)[[found.at[s.request.id] for s in pending]]

    def _take_over(self, followers: Sequence[tuple[RunningSequence, RunningSequence]], found: PrefillLogits) -> None:
        """Give each follower what its donor stored of their prompt, or of all tokens where they are equal."""
        copies: dict[int, int] = {}  # page: from which
        for sequence, donor in followers:
            most = min(len(sequence.request.prompt), len(sequence.tokens) - 1)
            if self._notes is not None:  # the prompt's last token may have gone to other experts
                most = len(sequence.request.prompt) - 1
            if donor.request.id in found.at and donor.tokens == sequence.tokens:
                found.at[sequence.request.id], most = found.at[donor.request.id], len(sequence.tokens)
            sequence.cached = min(most, donor.cached)
            n = pages_for(sequence.cached)
            pairs = zip(sequence.pages[:n], donor.pages[:n], strict=True)
            copies |= {own: others for own, others in pairs if own != others}
        if copies:
            self._model.copy_pages(list(copies), list(copies.values()))

    def _missing(self, sequence: RunningSequence) -> int:
        """Tokens to prefill before the sequence can decode, or has its logits."""
        return len(sequence.tokens) - sequence.cached - (not self._model.prefill_returns_logits)

    def _forward(self, sequences: Sequence[RunningSequence], found: PrefillLogits) -> None:
        """Prefill these: batches of similar length, long ones in chunks, never over the budget at once."""
        pending = [s for s in sequences if self._missing(s)]
        while pending:
            # fresh ones first: a batch of them needs no mask and reads no cache
            pending.sort(key=lambda s: (s.cached > 0, -self._missing(s)))
            fresh = not pending[0].cached
            width = min(self._missing(pending[0]), self._budget)
            batch = []
            for sequence in pending[: max(1, self._budget // width)]:
                if (not sequence.cached) != fresh or self._missing(sequence) * 4 < width * 3 - 32:
                    break
                batch.append(sequence)
            self._forward_batch(batch, width, found)
            pending = [s for s in pending if self._missing(s)]

    def _forward_batch(self, sequences: Sequence[RunningSequence], width: int, found: PrefillLogits) -> None:
        starts = [s.cached for s in sequences]
        rows = [s.tokens[s.cached :][: min(self._missing(s), width)] for s in sequences]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.cached += len(row)
        spans = [(start, len(row)) for start, row in zip(starts, rows, strict=True)]
        around = watched(self._notes, sequences, spans)
        logits = self._model.prefill([s.pages for s in sequences], starts, rows, around)
        if logits is not None:
            first = sum(map(len, found.logits))
            # of a chunk: until the next one
            found.at |= {sequence.request.id: first + i for i, sequence in enumerate(sequences)}
            found.logits.append(logits)
