"""The embedded generation engine: continuous batching over the slots of one key-value cache.

Owns the requests that run and wait, and the cache. Knows no tokenizer, no group and no process; a transformers causal
language model does the forward passes, and is left as it was found.

The invariant of a slot: the cache holds every token but the newest, which the next decode step reads. Samples of one
prompt copy what the first of them stored, and a request that lost its cache (new weights, no memory) is prefilled as a
longer prompt. Where a walk's prefill returns logits (`CachedModel.prefill_returns_logits`), it takes in the newest
token, too, so that the first draw of all samples of a prompt needs no decode step; another prefills up to it. Slots
without a valid cache are the last ones.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from realgraph.planner.request.engine_support import TORCH
from realgraph.runtime.engine import Completion, Decode, Request, RolloutLimits, Weights, WeightSpec
from realgraph.runtime.generate.cached_model import CachedModel
from realgraph.runtime.generate.sampling import SettingsTable, draw
from realgraph.runtime.generate.slots import PrefillLogits, RunningSequence, fill_gaps
from realgraph.runtime.models.train_state import read_counters
from realgraph.runtime.models.weights import read_into, take_weights, weight_specs

_LENGTH_MULTIPLE = (
    64  # cache lengths are multiples of it; on a CPU, where memory is what bounds short sequences, of a quarter
)
_SLOTS_PER_BLOCK = (
    32  # slots are kept in order of length by blocks, so that a decode step can read each block to its own length
)
_UNORDERED_LENGTH = 64  # a cache of this length is read as a whole: no order is worth a move


class TorchRolloutEngine:
    """RolloutEngine over a transformers causal language model in this process. One thread at a time may use it.

    The module may be shared with a train engine: its attention function and training flags are borrowed during `step`
    only. decode: token ids to text, needed for stop strings alone. Raises ValueError for a model with attention other
    than causal, full or sliding.
    """

    def __init__(
        self,
        module: nn.Module,
        limits: RolloutLimits | None = None,
        *,
        decode: Decode | None = None,
        version: int = 0,
        source: Path | None = None,
    ) -> None:
        self.version, self.source = version, source
        self._limits = limits or RolloutLimits()
        self._model = CachedModel(module, self._limits.cuda_graphs)
        self.device = self._model.device
        self._decode_text = decode
        self._max_length = self._limits.max_length or self._model.max_length
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []  # by slot: the live ones are always the first
        self._ids: set[int] = set()
        self._on_cpu = self.device.type == "cpu"
        slots = self._most_slots = self._limits.max_running or TORCH.running(cpu=self._on_cpu)
        self._round = _LENGTH_MULTIPLE // 4 if self._on_cpu else _LENGTH_MULTIPLE
        self._ready = 0  # slots with a valid cache: these, from the first on
        self._settings = SettingsTable(slots, self.device)
        self._newest: NDArray[np.int64] = np.zeros(slots, np.int64)  # token a slot reads next
        self._position: NDArray[np.int64] = np.zeros(slots, np.int64)  # of that token
        self._state: NDArray[np.int64] = np.zeros(slots, np.int64)  # equal numbers: equal tokens

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
        self._waiting.extend(RunningSequence(r, list(r.prompt), hash(r.prompt)) for r in requests)
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
            logits, n = self._logits(), len(self._running)
            positions = torch.from_numpy(self._position[:n] + 1).to(self.device)
            tokens, logprobs = draw(logits, self._settings.view(n), positions)
            return self._collect(tokens.tolist(), logprobs.tolist())

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """See RolloutEngine. What is left unfinished inside is forgotten."""
        aside, ids = deque([*self._running, *self._waiting]), self._ids
        self._forget()
        self._running, self._waiting, self._ids = [], deque(), set()
        try:
            yield
        finally:
            self._ready, self._running, self._waiting, self._ids = 0, [], aside, ids

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
        """Bytes that the key-value cache occupies on the device."""
        return self._model.cache.nbytes

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """See RolloutEngine."""
        return weight_specs(self._model.module)

    def load_weights(self, weights: Weights, version: int) -> None:
        """See RolloutEngine."""
        take_weights(self._model.module, weights, lambda own, new: own.copy_(new))
        self.weights_changed(version)

    def load(self, folder: Path) -> None:
        """See RolloutEngine."""
        read_into(self._model.module, folder, "lm")
        self.weights_changed(read_counters(folder).version)

    def weights_changed(self, version: int) -> None:
        """See RolloutEngine."""
        self._forget()
        self._model.weights_changed()
        self.version = version

    def release(self) -> None:
        """Give the cache's memory back; running sequences keep their slots and are prefilled again by the next step."""
        self._forget()
        self._model.release()

    def _forget(self) -> None:
        """Forgets what the cache holds: it is of no use any more."""
        self._ready = 0
        for sequence in self._running:
            sequence.cached = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def _problem(self, request: Request) -> str:
        """Reason why a request can never run, '' if it can."""
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
        if most is not None and self._round_up(length + 1) > most:
            return f"its {length} tokens can't fit a cache of {most} tokens"
        if request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            return f"temperature {request.temperature}, top_p {request.top_p}, top_k {request.top_k} are out of range"
        if request.stop_strings and self._decode_text is None:
            return "stop strings need an engine that can decode tokens"
        return ""

    def _round_up(self, n: int) -> int:
        return -(-n // self._round) * self._round

    # --- slots --------------------------------------------------------------------------------------------------------

    def _allowed(self, length: int) -> int:
        """Slots of `length` positions that the limits allow."""
        most = self._limits.max_cache_tokens
        return self._most_slots if most is None else min(self._most_slots, most // length)

    def _length(self) -> int:
        """Positions the running sequences need now: their newest token and the bin."""
        n = len(self._running)
        return self._round_up((int(self._position[:n].max()) + 1 if n else 0) + 1)

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
        states: dict[tuple[int, ...], int] = {}
        while self._waiting:
            sequence = self._waiting[0]
            longer = max(length, self._round_up(len(sequence.tokens) + 1))
            if len(self._running) >= self._allowed(longer):
                break
            cost = len(sequence.tokens) - (len(sequence.request.prompt) if sequence.key in known else 1)
            if tokens and tokens + cost > self._limits.prefill_tokens:
                break
            length, tokens = longer, tokens + cost
            known.add(sequence.key)
            self._waiting.popleft()
            slot = len(self._running)
            self._settings.put(slot, sequence.request)
            self._newest[slot], self._position[slot] = sequence.tokens[-1], len(sequence.tokens) - 1
            # running slots have smaller numbers: see _collect
            self._state[slot] = states.setdefault(tuple(sequence.tokens), self._most_slots + len(states))
            self._running.append(sequence)
        self._reserve(length)

    def _reserve(self, length: int) -> None:
        """A cache of at least `length` for the running sequences; grown in big steps, as growing copies it."""
        cache, n = self._model.cache, len(self._running)
        if n <= cache.slots and length <= cache.length:
            return
        slots = max(n, 8, min(2 * cache.slots, self._most_slots))
        if length > cache.length:
            most = max((len(s.request.prompt) + s.request.max_new_tokens for s in self._running), default=0)
            # a graph is lost with the cache it was captured on: a GPU takes the last size at once
            roomy = cache.length * 3 // 2 if self.device.type == "cpu" else most
            roomy = max(length, self._round_up(min(roomy, most) + 1))
            length = roomy if self._allowed(roomy) >= n else length
        elif self._allowed(cache.length) >= n:
            length = cache.length
        slots = max(n, min(slots, self._allowed(length)))
        # slots below n may be new in this step: what lies there is of no use, and copied with the rest
        cache.resize(slots, length, min(cache.slots, slots), min(cache.length, length))

    def _remove(self, slots: Sequence[int]) -> None:
        """Free these slots; live ones move into the gaps."""
        # a GPU reads all slots to one length: there any live slot may fill a gap
        ordered = self._on_cpu and self._model.cache.length > _UNORDERED_LENGTH
        end = len(self._running) - len(slots)
        held = fill_gaps(self._position[: len(self._running)], slots, _SLOTS_PER_BLOCK if ordered else None)
        self._move([slot for slot in range(end) if held[slot] != slot], held)
        del self._running[end:]
        self._ready = min(self._ready, end)

    def _move(self, to: list[int], held: list[int]) -> None:
        """Each slot of `to` takes over what another held, all at once; positions have moved already."""
        if not to:
            return
        source = [held[slot] for slot in to]
        for slot, sequence in zip(to, [self._running[slot] for slot in source], strict=True):
            self._running[slot] = sequence
        self._settings.move(to, source)
        for column in (self._newest, self._state):
            column[to] = column[source]
        self._model.cache.copy(to, source, max(self._running[slot].cached for slot in to))

    # --- forward passes -----------------------------------------------------------------------------------------------

    def _logits(self) -> Tensor:
        """[n, V] for the next token of each slot: decoded, or given by the prefill."""
        prefilled = self._prefill()
        n = self._ready if prefilled is not None else len(self._running)
        columns = self._newest[:n], self._position[:n], self._state[:n]
        parts = [self._model.decode(*columns)] if n else []
        return torch.cat([*parts, prefilled]) if prefilled is not None else parts[0]

    def _prefill(self) -> Tensor | None:
        """Bring every slot to where it can decode. The first sequence of each prompt goes ahead; the others copy.

        Returns the logits [k, V] of the slots that had no valid cache, where prefills return them, else None.
        """
        pending = range(self._ready, len(self._running))
        if not pending:
            return None
        donors = {s.key: slot for slot, s in enumerate(self._running) if s.cached >= len(s.request.prompt) - 1}
        leaders, followers = [], []
        for slot in pending:
            sequence = self._running[slot]
            sequence.cached = min(sequence.cached, len(sequence.tokens) - 1)
            if not sequence.cached and self._shares(donors.setdefault(sequence.key, slot), slot):
                followers.append(slot)
            else:
                leaders.append(slot)
        prefilled = PrefillLogits()
        self._forward(leaders, prefilled)
        copies: dict[int, tuple[list[int], list[int]]] = {}  # by length: slots, donors
        for slot in followers:
            sequence, donor = self._running[slot], donors[self._running[slot].key]
            most = min(len(sequence.request.prompt), len(sequence.tokens) - 1)
            if donor in prefilled.at and self._running[donor].tokens == sequence.tokens:
                prefilled.at[slot], most = prefilled.at[donor], len(sequence.tokens)
            sequence.cached = min(most, self._running[donor].cached)
            for column, number in zip(copies.setdefault(sequence.cached, ([], [])), (slot, donor), strict=True):
                column.append(number)
        for length, (slots, sources) in copies.items():
            self._model.cache.copy(slots, sources, length)
        self._forward([slot for slot in followers if slot not in prefilled.at], prefilled)
        return (
            torch.cat(prefilled.logits)[[prefilled.at[slot] for slot in pending]]
            if self._model.prefill_returns_logits
            else None
        )

    def _shares(self, donor: int, slot: int) -> bool:
        """True where `slot` can copy its prompt from `donor` (the hash alone could lie)."""
        return donor != slot and self._running[donor].request.prompt == self._running[slot].request.prompt

    def _missing(self, slot: int) -> int:
        """Tokens to prefill before the slot can decode, or has its logits."""
        return len(self._running[slot].tokens) - self._running[slot].cached - (not self._model.prefill_returns_logits)

    def _forward(self, slots: Sequence[int], prefilled: PrefillLogits) -> None:
        """Prefill these slots: batches of similar length, long ones in chunks, never over `prefill_tokens` at once."""
        budget = self._limits.prefill_tokens
        pending = [slot for slot in slots if self._missing(slot)]
        while pending:
            # fresh ones first: a batch of them needs no mask and reads no cache
            pending.sort(key=lambda slot: (self._running[slot].cached > 0, -self._missing(slot)))
            fresh = not self._running[pending[0]].cached
            width = min(self._missing(pending[0]), budget)
            batch = []
            for slot in pending[: max(1, budget // width)]:
                if (not self._running[slot].cached) != fresh or self._missing(slot) * 4 < width * 3 - 32:
                    break
                batch.append(slot)
            self._forward_batch(batch, width, prefilled)
            pending = [slot for slot in pending if self._missing(slot)]

    def _forward_batch(self, slots: Sequence[int], width: int, prefilled: PrefillLogits) -> None:
        sequences = [self._running[slot] for slot in slots]
        starts = [s.cached for s in sequences]
        rows = [
            s.tokens[s.cached :][: min(self._missing(slot), width)] for slot, s in zip(slots, sequences, strict=True)
        ]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.cached += len(row)
        logits = self._model.prefill(slots, starts, rows)
        if logits is not None:
            first = sum(map(len, prefilled.logits))
            prefilled.at |= {slot: first + i for i, slot in enumerate(slots)}  # of a chunk: until the next one
            prefilled.logits.append(logits)

    def _collect(self, tokens: list[int], logprobs: list[float]) -> list[Completion]:
        """Append what was drawn; take out what has ended."""
        done: list[Completion] = []
        free: list[int] = []
        version = self.version
        if math.isnan(sum(logprobs)):
            broken = next(s for s, logprob in zip(self._running, logprobs, strict=True) if math.isnan(logprob))
            self._forget()
            raise FloatingPointError(f"request {broken.request.id}: the model's logits are NaN")
        n = self._ready = len(self._running)
        # numbered anew from 0, so that they never grow
        self._state[:n] = np.unique(self._state[:n] * self._model.vocabulary + tokens, return_inverse=True)[1]
        self._newest[:n] = tokens
        self._position[:n] += 1
        for slot, (sequence, token, logprob) in enumerate(zip(self._running, tokens, logprobs, strict=True)):
            sequence.cached = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            request = sequence.request
            stopped = token in request.stop_tokens or bool(
                request.stop_strings and sequence.says_stop(self._decode_text)
            )
            if stopped or len(sequence.versions) == request.max_new_tokens:
                done.append(sequence.completion(stopped))
                free.append(slot)
                self._ids.discard(request.id)
        self._remove(free)
        return done
