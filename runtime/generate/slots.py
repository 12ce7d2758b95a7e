"""The contents of a generation engine's slots, and what each is to hold after some have ended. Knows no cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.engine import Completion, Decode, Request


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A request that runs or waits."""

    request: Request
    tokens: list[int]  # prompt, then what was drawn
    key: int  # hash of the prompt, once computed
    cached: int = 0  # tokens with valid keys, from the first on
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def says_stop(self, decode: Decode | None) -> bool:
        """The newest text holds a stop string. A character may take four tokens, so the tail is cut wide."""
        assert decode is not None, "stop strings were let in without a decoder"
        stops = self.request.stop_strings
        longest = max(map(len, stops))
        text = decode(self.tokens[max(len(self.request.prompt), len(self.tokens) - 4 * longest - 8) :])
        return any(stop in text for stop in stops)

    def completion(self, finished: bool) -> Completion:
        new = tuple(self.tokens[len(self.request.prompt) :])
        return Completion(self.request.id, new, tuple(self.logprobs), tuple(self.versions), finished)


@dataclass
class PrefillLogits:
    """Logits [*, V] that prefills returned, one after the other, and the row of each slot among them."""

    logits: list[Tensor] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)


def fill_gaps(lengths: NDArray[np.int64], gaps: Sequence[int], block: int | None) -> list[int]:
    """For each slot, the slot whose sequence it is to hold; the first n - len(gaps) entries are what is left.

    lengths: [n], of the sequences by slot; it is changed as they move. With a block the longer stay before the shorter,
    block by block: a gap takes the longest sequence of the next block, whose gap takes from the block after it. Without
    one a gap takes the last sequence.
    """
    end = len(lengths)
    held = list(range(end))
    for slot in sorted(gaps, reverse=True):
        gap = slot
        end -= 1
        while gap < end:
            source = end if block is None else min((gap // block + 1) * block, end)
            if block is not None and source < end:
                source += int(lengths[source : min(source + block, end + 1)].argmax())
            held[gap], lengths[gap] = held[source], lengths[source]
            gap = source
    return held
