"""The embedded generation engine: continuous batching over the slots of one key-value cache.

Owns the requests that run and wait, and the cache. Knows no tokenizer, no group and no process; a transformers causal
language model does the forward passes, and is left as it was found.

The invariant of a slot: the cache holds every token but the newest, which the next decode step reads. So a prompt is
prefilled up to its last token, samples of one prompt copy what the first of them stored, and a request that lost its
cache (new weights, no memory) is prefilled as a longer prompt.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from realgraph.runtime.cached_model import CachedModel
from realgraph.runtime.engine import Completion, Request
from realgraph.runtime.sampling import SettingsTable, draw

_ROUND = 64  # cache lengths are multiples of it
_BLOCK = 32  # slots are kept in order of length by blocks, so that a decode step can read each block to its own length

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine. Lengths and tokens count prompt and response.

    max_length: of a sequence; default: the model's positions. max_cache_tokens: slots x length of the cache; default:
    only bounded by max_running. prefill_tokens: of one forward pass, padding included, and of the new prompts that one
    step takes in. cuda_graphs: replay decode steps on a GPU; without effect on a CPU.
    """

    max_running: int = 128
    max_length: int | None = None
    max_cache_tokens: int | None = None
    prefill_tokens: int = 4096
    cuda_graphs: bool = True


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request in work. tokens: prompt, then what was drawn. cached: tokens with valid keys, from the first on."""

    request: Request
    tokens: list[int]
    key: int  # hash of the prompt, once computed
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens to prefill before it can decode."""
        return len(self.tokens) - 1 - self.cached

    def completion(self, finished: bool) -> Completion:
        new = tuple(self.tokens[len(self.request.prompt) :])
        return Completion(self.request.id, new, tuple(self.logprobs), tuple(self.versions), finished)


def _round_up(n: int) -> int:
    return -(-n // _ROUND) * _ROUND


class TorchRolloutEngine:
    """RolloutEngine over a transformers causal language model in this process. One thread at a time may use it.

    The module may be shared with a train engine: its attention function and training flags are borrowed during `step`
    only. decode: token ids to text, needed for stop strings alone. Raises ValueError for a model with attention other
    than causal, full or sliding.
    """

    def __init__(
        self,
        module: nn.Module,
        limits: Limits | None = None,
        *,
        decode: Decode | None = None,
        version: int = 0,
    ) -> None:
        self.version = version
        self._limits = limits or Limits()
        self._model = CachedModel(module, self._limits.cuda_graphs)
        self._decode_text = decode
        self._max_length = self._limits.max_length or self._model.max_length
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by slot: the live ones are always the first
        self._ids: set[int] = set()
        slots = self._limits.max_running
        # a GPU reads all slots to one length: there any live slot may fill a gap
        self._block = _BLOCK if self._model.device.type == "cpu" else slots
        self._settings = SettingsTable(slots, self._model.device)
        self._newest: NDArray[np.int64] = np.zeros(slots, np.int64)  # token a slot reads next
        self._position: NDArray[np.int64] = np.zeros(slots, np.int64)  # of that token

    # --- the interface ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError for one that can never run, naming it and why."""
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or not self._ids.isdisjoint(ids):
            twice = sorted({i for i in ids if i in self._ids or ids.count(i) > 1})
            raise ValueError(f"request ids in use already: {', '.join(map(str, twice))}")
        for request in requests:
            problem = self._problem(request)
            if problem:
                raise ValueError(f"request {request.id}: {problem}")
        self._waiting.extend(_Sequence(r, list(r.prompt), hash(r.prompt)) for r in requests)
        self._ids.update(ids)

    def abort(self, ids: Sequence[int]) -> None:
        """Forget these requests, running or queued; ids that are not here (finished before) are passed over."""
        gone = self._ids.intersection(ids)
        if not gone:
            return
        self._ids -= gone
        self._waiting = deque(s for s in self._waiting if s.request.id not in gone)
        with torch.inference_mode():  # the cache was made in it
            self._remove([slot for slot, s in enumerate(self._running) if s.request.id in gone])

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for each running sequence, return what finished.

        Raises FloatingPointError where the model's logits are NaN; nothing is drawn then.
        """
        if self.idle:
            return []
        with self._model.borrowed():
            self._make_room()
            self._admit()
            self._prefill()
            n = len(self._running)
            logits = self._model.decode(self._newest[:n], self._position[:n])
            positions = torch.from_numpy(self._position[:n] + 1).to(self._model.device)
            tokens, logprobs = draw(logits, self._settings.view(n), positions)
            return self._collect(tokens.tolist(), logprobs.tolist())

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def cache_bytes(self) -> int:
        """What the key-value cache occupies on the device."""
        return self._model.cache.nbytes

    def update(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """See RolloutEngine. Weights come by the module's own names and are copied in place; a tied weight may be left
        out. Raises ValueError, before anything is changed, for names or shapes that the module does not have."""
        if weights is not None:
            self._model.take(weights)
        for sequence in self._running:
            sequence.cached = 0
        self._model.weights_changed()
        self.version = version

    def release(self) -> None:
        """Give the cache's memory back; running sequences keep their slots and are prefilled again by the next step."""
        for sequence in self._running:
            sequence.cached = 0
        self._model.release()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _problem(self, request: Request) -> str:
        """Why a request can never run, '' if it can."""
        length = len(request.prompt) + request.max_new_tokens
        most = self._limits.max_cache_tokens
        if not request.prompt:
            return "its prompt is empty"
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._model.vocabulary:
            return f"its prompt has tokens outside the model's vocabulary of {self._model.vocabulary}"
        if request.max_new_tokens < 1:
            return "max_new_tokens must be at least 1"
        if length > self._max_length:
            return f"{len(request.prompt)} prompt + {request.max_new_tokens} new tokens exceed {self._max_length}"
        if most is not None and _round_up(length + 1) > most:
            return f"its {length} tokens can't fit a cache of {most} tokens"
        if request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            return f"temperature {request.temperature}, top_p {request.top_p}, top_k {request.top_k} are out of range"
        if request.stop_strings and self._decode_text is None:
            return "stop strings need an engine that can decode tokens"
        return ""

    # --- slots --------------------------------------------------------------------------------------------------------

    def _allowed(self, length: int) -> int:
        """Slots of `length` positions that the limits allow."""
        most = self._limits.max_cache_tokens
        return self._limits.max_running if most is None else min(self._limits.max_running, most // length)

    def _length(self) -> int:
        """Positions the running sequences need now: their newest token and the bin."""
        return _round_up(max((len(s.tokens) for s in self._running), default=0) + 1)

    def _make_room(self) -> None:
        """Before a step: where the longest sequence has outgrown its share, the youngest go back to the queue."""
        length = self._length()
        while len(self._running) > self._allowed(length):
            youngest = min(range(len(self._running)), key=lambda slot: len(self._running[slot].versions))
            sequence = self._running[youngest]
            self._remove([youngest])
            sequence.cached = 0
            self._waiting.appendleft(sequence)
            length = self._length()
        self._reserve(length)

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served, as far as this step's prefill goes."""
        length, tokens = self._length(), 0
        known = {s.key for s in self._running}
        while self._waiting:
            sequence = self._waiting[0]
            longer = max(length, _round_up(len(sequence.tokens) + 1))
            if len(self._running) >= self._allowed(longer):
                break
            cost = len(sequence.tokens) - len(sequence.request.prompt) if sequence.key in known else sequence.missing
            if tokens and tokens + cost > self._limits.prefill_tokens:
                break
            length, tokens = longer, tokens + cost
            known.add(sequence.key)
            self._waiting.popleft()
            self._settings.put(len(self._running), sequence.request)
            self._running.append(sequence)
        self._reserve(length)
        for slot, sequence in enumerate(self._running):
            self._newest[slot] = sequence.tokens[-1]
            self._position[slot] = len(sequence.tokens) - 1

    def _reserve(self, length: int) -> None:
        """A cache of at least `length` for the running sequences; grown in big steps, as growing copies it."""
        cache, n = self._model.cache, len(self._running)
        if n <= cache.slots and length <= cache.length:
            return
        slots = max(n, 8, min(2 * cache.slots, self._limits.max_running))
        if length > cache.length:
            most = max((len(s.request.prompt) + s.request.max_new_tokens for s in self._running), default=0)
            # a graph is lost with the cache it was captured on: a GPU takes the last size at once
            roomy = cache.length * 3 // 2 if self._model.device.type == "cpu" else most
            roomy = max(length, _round_up(min(roomy, most) + 1))
            length = roomy if self._allowed(roomy) >= n else length
        elif self._allowed(cache.length) >= n:
            length = cache.length
        slots = max(n, min(slots, self._allowed(length)))
        # slots below n may be new in this step: what lies there is of no use, and copied with the rest
        cache.resize(slots, length, min(cache.slots, slots), min(cache.length, length))

    def _remove(self, slots: Sequence[int]) -> None:
        """Free these slots; live ones move into the gaps, so that they stay first and the longer ones before the
        shorter: a gap takes the longest sequence of the next block, whose gap takes from the block after it."""
        for slot in sorted(slots, reverse=True):
            gap = slot
            end = len(self._running) - 1
            while gap < end:
                low = min((gap // self._block + 1) * self._block, end)
                source = low + int(self._position[low : min(low + self._block, end + 1)].argmax())
                self._move(gap, source)
                gap = source
            self._running.pop()

    def _move(self, to: int, source: int) -> None:
        sequence = self._running[to] = self._running[source]
        self._settings.move(to, source)
        self._position[to] = self._position[source]
        if sequence.cached:
            self._model.cache.copy([to], [source], sequence.cached)

    # --- forward passes -----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Bring every slot to where it can decode. The first sequence of each prompt goes ahead; the others copy."""
        pending = [slot for slot, s in enumerate(self._running) if s.missing]
        if not pending:
            return
        donors = {s.key: slot for slot, s in enumerate(self._running) if s.cached >= len(s.request.prompt) - 1}
        leaders, followers = [], []
        for slot in pending:
            sequence = self._running[slot]
            if not sequence.cached and self._shares(donors.setdefault(sequence.key, slot), slot):
                followers.append(slot)
            else:
                leaders.append(slot)
        self._forward(leaders)
        by_donor: dict[tuple[int, int], list[int]] = {}
        for slot in followers:
            sequence, donor = self._running[slot], donors[self._running[slot].key]
            sequence.cached = min(len(sequence.request.prompt), len(sequence.tokens) - 1, self._running[donor].cached)
            by_donor.setdefault((donor, sequence.cached), []).append(slot)
        for (donor, length), slots in by_donor.items():
            self._model.cache.copy(slots, [donor] * len(slots), length)
        self._forward([slot for slot in followers if self._running[slot].missing])

    def _shares(self, donor: int, slot: int) -> bool:
        """Whether `slot` can copy its prompt from `donor` (the hash alone could lie)."""
        return donor != slot and self._running[donor].request.prompt == self._running[slot].request.prompt

    def _forward(self, slots: Sequence[int]) -> None:
        """Prefill these slots: batches of similar length, long ones in chunks, never over `prefill_tokens` at once."""
        budget = self._limits.prefill_tokens
        pending = list(slots)
        while pending:
            # fresh ones first: a batch of them needs no mask and reads no cache
            pending.sort(key=lambda slot: (self._running[slot].cached > 0, -self._running[slot].missing))
            first = self._running[pending[0]]
            width = min(first.missing, budget)
            batch = []
            for slot in pending[: max(1, budget // width)]:
                sequence = self._running[slot]
                if (sequence.cached > 0) != (first.cached > 0) or sequence.missing * 4 < width * 3 - 32:
                    break
                batch.append(slot)
            self._forward_batch(batch, width)
            pending = [slot for slot in pending if self._running[slot].missing]

    def _forward_batch(self, slots: Sequence[int], width: int) -> None:
        sequences = [self._running[slot] for slot in slots]
        starts = [s.cached for s in sequences]
        rows = [s.tokens[s.cached : s.cached + min(s.missing, width)] for s in sequences]
        self._model.prefill(slots, starts, rows)
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.cached += len(row)

    def _collect(self, tokens: list[int], logprobs: list[float]) -> list[Completion]:
        """Append what was drawn; take out what has ended."""
        done: list[Completion] = []
        free: list[int] = []
        version = self.version
        if math.isnan(sum(logprobs)):
            broken = next(s for s, logprob in zip(self._running, logprobs, strict=True) if math.isnan(logprob))
            raise FloatingPointError(f"request {broken.request.id}: the model's logits are NaN")
        for slot, (sequence, token, logprob) in enumerate(zip(self._running, tokens, logprobs, strict=True)):
            sequence.cached += 1
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            request = sequence.request
            stopped = token in request.stop_tokens or (bool(request.stop_strings) and self._says_stop(sequence))
            if stopped or len(sequence.versions) == request.max_new_tokens:
                done.append(sequence.completion(stopped))
                free.append(slot)
                self._ids.discard(request.id)
        self._remove(free)
        return done

    def _says_stop(self, sequence: _Sequence) -> bool:
        """Whether the newest text holds a stop string. A character may take four tokens, so the tail is cut wide."""
        assert self._decode_text is not None
        longest = max(map(len, sequence.request.stop_strings))
        new = sequence.tokens[max(len(sequence.request.prompt), len(sequence.tokens) - 4 * longest - 8) :]
        text = self._decode_text(new)
        return any(stop in text for stop in sequence.request.stop_strings)
