"""The sequences of a generation engine, and the running ones as the columns that a decode step reads."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.attention.pages import PAGE_TOKENS
from realgraph.runtime.data.stops import says_stop
from realgraph.runtime.drawn.tokens import DrawnTokens, pack
from realgraph.runtime.engine import Completion, Decode, Request
from realgraph.runtime.generate.sampling import SamplingSettings, SettingsTable
from realgraph.runtime.parallel.experts.kept import RouteNotes, RouteSpan, SequenceRoutes
from realgraph.runtime.parallel.pipeline.rollout import Around, Draws


@dataclass(eq=False, slots=True)
class RunningSequence:
    """A request that runs or waits."""

    request: Request
    tokens: list[int]  # prompt, then what was drawn
    key: int  # hash of the prompt, once computed
    cached: int = 0  # tokens with valid keys, from the first on
    pages: list[int] = field(default_factory=list)  # of the cache, as far as its tokens go
    began: int = 0  # the version of the weights that computed its first keys, where there are valid ones
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: Sequence[SequenceRoutes] | None = None  # where the experts of its tokens are kept, by chunk of layers

    @staticmethod
    def of(request: Request, routes: Sequence[SequenceRoutes] | None) -> "RunningSequence":
        """A request that waits, with the tokens that others have drawn of it."""
        tokens, logprobs, versions = request.drawn.lists() if request.drawn is not None else ([], [], [])
        sequence = RunningSequence(request, [*request.prompt, *tokens], hash(request.prompt), routes=routes)
        sequence.logprobs, sequence.versions = logprobs, versions
        return sequence

    def drawn(self, start: int) -> DrawnTokens:
        """Its new tokens from the `start`-th on."""
        new = self.tokens[len(self.request.prompt) + start :]
        return pack(self.request.id, new, self.logprobs[start:], self.versions[start:], start)

    def says_stop(self, decode: Decode | None) -> bool:
        """The newest text holds a stop string."""
        assert decode is not None, "stop strings were let in without a decoder"
        return says_stop(self.tokens[len(self.request.prompt) :], self.request.stop_strings, decode)

    def shares(self, version: int) -> bool:
        """True where its prompt's keys are those of weights `version`, or will be: others may have them, too."""
        return not self.cached or self.began == version

    def completion(self, finished: bool, routes: Tensor | None = None) -> Completion:
        new = tuple(self.tokens[len(self.request.prompt) :])
        return Completion(self.request.id, new, tuple(self.logprobs), tuple(self.versions), finished, routes)


def watched(notes: RouteNotes | None, sequences: Sequence[RunningSequence], spans: Sequence[tuple[int, int]]) -> Around:
    """To be entered for each chunk of layers that one pass goes through, over tokens from `start` on, `count` of them,
    of each of these sequences; where the experts of tokens are kept, it takes those that there are, and leaves those
    that it chooses."""
    if notes is None:
        return lambda _: nullcontext()
    both = zip(sequences, spans, strict=True)
    return partial(notes.watched, [RouteSpan(s.routes, *span) for s, span in both if s.routes is not None])


@dataclass
class PrefillLogits:
    """Logits [*, V] that prefills returned, one after the other, and among them the row of each request, by its id."""

    logits: list[Tensor] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)


class Slots:
    """By slot, the live ones first: the newest token, its position, the pages, the sampling settings, and a number that
    is equal where all tokens are."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._most, self._device = most, device
        self.newest: NDArray[np.int64] = np.zeros(most, np.int64)
        self.position: NDArray[np.int64] = np.zeros(most, np.int64)
        self.state: NDArray[np.int64] = np.zeros(most, np.int64)
        self._settings = SettingsTable(most, device)
        self._pages: NDArray[np.int64] = np.zeros((most, 1), np.int64)

    def put(self, slot: int, sequence: RunningSequence, state: int) -> None:
        """Give `slot` to a sequence with pages. state: any number that those of equal tokens have, and no other."""
        self._settings.put(slot, sequence.request)
        self.newest[slot], self.position[slot] = sequence.tokens[-1], len(sequence.tokens) - 1
        self.state[slot] = state
        self._widen(len(sequence.pages))
        self._pages[slot] = 0
        self._pages[slot, : len(sequence.pages)] = sequence.pages

    def add_page(self, slot: int, number: int, page: int) -> None:
        """The page for tokens `number` x PAGE_TOKENS onwards."""
        self._widen(number + 1)
        self._pages[slot, number] = page

    def at_page_start(self, n: int) -> list[int]:
        """Those of the first n slots whose newest token is the first of a page."""
        found: list[int] = np.flatnonzero(self.position[:n] % PAGE_TOKENS == 0).tolist()
        return found

    def advance(self, tokens: Sequence[int], vocabulary: int) -> None:
        """Take in the tokens [n] that were drawn for the first n slots."""
        n = len(tokens)
        # numbered anew from 0, so that they never grow
        self.state[:n] = np.unique(self.state[:n] * vocabulary + tokens, return_inverse=True)[1]
        self.newest[:n] = tokens
        self.position[:n] += 1

    def longest_first(self, slots: Sequence[int]) -> list[int]:
        """These slots in order of length, so that rows of like lengths lie side by side."""
        chosen = np.array(slots, np.int64)
        order: list[int] = chosen[np.argsort(-self.position[chosen], kind="stable")].tolist()
        return order

    def arrange(self, order: Sequence[int]) -> None:
        """Slot i takes over what slot `order[i]` held, all at once."""
        source = np.array(order, np.int64)
        for column in (self.newest, self.position, self.state, self._pages):
            column[: len(order)] = column[source]
        self._settings.arrange(source)

    def pages(self, n: int) -> NDArray[np.int64]:
        """The pages [n, m] of the first n slots, as far as the longest goes; 0 beyond a sequence's own."""
        return self._pages[:n, : int(self.position[:n].max()) // PAGE_TOKENS + 1]

    def settings(self, n: int) -> SamplingSettings:
        """Settings to draw with for the first n slots."""
        return self._settings.view(n)

    def next_positions(self, n: int) -> Tensor:
        """Positions [n] of the tokens that are drawn next, on the device."""
        return torch.from_numpy(self.position[:n] + 1).to(self._device)

    def _widen(self, pages: int) -> None:
        wide = self._pages.shape[1]
        if pages > wide:
            self._pages = np.pad(self._pages, ((0, 0), (0, max(pages, 2 * wide) - wide)))


@dataclass
class SequenceLane:
    """Sequences that make each pass together, by slot: the live ones are always the first. Several lanes are on
    different pipeline stages at a time."""

    slots: Slots
    running: list[RunningSequence] = field(default_factory=list)
    ready: int = 0  # slots with a valid cache: these, from the first on
    flight: "Flight | None" = None  # the pass that is under way

    def put(self, sequence: RunningSequence, state: int) -> None:
        """Add a sequence with pages; state: see `Slots.put`."""
        self.slots.put(len(self.running), sequence, state)
        self.running.append(sequence)

    def keep(self, order: Sequence[int]) -> list[RunningSequence]:
        """Slots `order` live on, in this order; returns the others."""
        if list(order) == list(range(len(self.running))):
            return []
        kept = set(order)
        gone = [sequence for slot, sequence in enumerate(self.running) if slot not in kept]
        self.slots.arrange(order)
        self.running = [self.running[slot] for slot in order]
        self.ready = sum(slot < self.ready for slot in order)
        return gone

    def take_over(self, sequences: Sequence[RunningSequence]) -> None:
        """Add sequences of another lane."""
        for sequence in sequences:
            states = self.slots.state
            self.put(sequence, int(states[: len(self.running)].max(initial=2 * len(states))) + 1)


@dataclass(frozen=True)
class Flight:
    """A pass whose draws have not been taken in yet. rows: the sequences that it decodes, in order."""

    rows: tuple[RunningSequence, ...]
    draws: Draws
