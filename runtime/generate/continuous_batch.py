"""Continuous batching over one paged key-value cache: one decode step after the other, by the caller's thread.

Owns the requests that run and wait, and the cache. Knows no tokenizer, no group, no thread and no process; a
transformers causal language model does the forward passes, and is left as it was found.

The invariant of a slot: the cache holds every token but the newest, which the next decode step reads. Samples of one
prompt share its full pages. Where no page is free, the youngest sequence gives its own back and waits with its tokens.
Slots without a valid cache are the last ones.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from realgraph.planner.request.engine_support import TORCH
from realgraph.runtime.attention.pages import PagePool, pages_for
from realgraph.runtime.engine import RELEASED, Completion, Decode, Parts, Request, RolloutLimits, WeightSpec
from realgraph.runtime.generate.cached_model import CachedModel
from realgraph.runtime.generate.prefill import Prefill, shared_pages
from realgraph.runtime.generate.request_bounds import RequestBounds
from realgraph.runtime.generate.slots import RunningSequence, Slots
from realgraph.runtime.models.host_states import DroppedStorages, HostStates
from realgraph.runtime.models.train_state import read_counters
from realgraph.runtime.models.weights import read_into, take_weights, weight_specs

_STEPS_AHEAD = 4  # of the running sequences' growth: free pages that admission leaves to them


class ContinuousBatch:
    """The sequences that a transformers causal language model of this process decodes. One thread at a time may use it.

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
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []  # by slot: the live ones are always the first
        self._aside: list[RunningSequence] = []  # those that wait with their pages while others run
        self._ids: set[int] = set()
        on_cpu = self.device.type == "cpu"
        self._most_slots = self._limits.max_running or TORCH.max_running
        most_tokens, cache_tokens = self._limits.max_length or self._model.max_length, self._limits.max_cache_tokens
        self._bounds = RequestBounds(self._model.vocabulary, most_tokens, cache_tokens, decode is not None)
        # a GPU's graphs are lost with the cache they were captured on
        self._pool = PagePool(None if cache_tokens is None else pages_for(cache_tokens), at_once=not on_cpu)
        self._prefill = Prefill(self._model, self._limits.prefill_tokens)
        self._slots = Slots(self._most_slots, self.device)
        self._dropped = DroppedStorages()
        self._states: HostStates | None = None  # weights that wait in host memory
        self._use = ExitStack()  # of them
        self._ready = 0  # slots with a valid cache: these, from the first on

    # --- the interface ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises ValueError for one that can never run, naming it and why."""
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or not self._ids.isdisjoint(ids):
            twice = sorted({i for i in ids if i in self._ids or ids.count(i) > 1})
            raise ValueError(f"request ids in use already: {', '.join(map(str, twice))}")
        for request in requests:
            problem = self._bounds.problem(request)
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
        self._keep([slot for slot, s in enumerate(self._running) if s.request.id not in gone])

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for each running sequence, return what finished. Collective over replicas
        that share experts, with sequences or without.

        Raises FloatingPointError where the model's logits are NaN; nothing is drawn then.
        """
        if self._states is not None and self._states.away:
            self._use.enter_context(self._states.used(changed=False))
        with self._model.borrowed():
            if self.idle:
                self._model.finish_passes()
                return []
            self._make_room()
            self._admit()
            self._model.cache.reserve(self._pool.total)
            logits, n = self._logits(), len(self._running)
            self._model.finish_passes()
            tokens, logprobs = self._model.draw(logits, self._slots.settings(n), self._slots.next_positions(n))
            return self._collect(tokens.tolist(), logprobs.tolist())

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, there is no request, and others may come; what is left of those is forgotten. Afterwards the requests
        from before go on as if nothing had been; only where the others need their pages are their caches recomputed."""
        running, waiting, ids = self._running, self._waiting, self._ids
        states, ready, before = self._slots.state[: len(running)].copy(), self._ready, self._aside
        self._running, self._waiting, self._ids, self._ready = [], deque(), set(), 0
        self._aside = [*before, *running]
        try:
            yield
        finally:
            self._keep([])
            self._aside, self._waiting, self._ids = before, waiting, ids
            if all(sequence.pages for sequence in running):
                for slot, (sequence, state) in enumerate(zip(running, states.tolist(), strict=True)):
                    self._slots.put(slot, sequence, state)
                self._running = running
                self._ready = ready if all(sequence.cached for sequence in running) else 0
            else:
                self._waiting.extendleft(reversed(running))

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have not begun, or gave their pages to older ones."""
        return len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key-value cache occupies on the device."""
        return self._model.cache.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights where they are on the device."""
        return sum(parameter.nbytes for parameter in self._model.module.parameters())

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """All weights, in the order in which they are sent."""
        return weight_specs(self._model.module)

    def load_weights(self, parts: Parts) -> None:
        """Take weights in place, part by part; to be followed by `weights_changed`. Raises ValueError for parts that
        are missing or have no place."""
        self._dropped.restore()
        take_weights(self._model.module, parts, lambda own, new: own.copy_(new))

    def drop_weights(self) -> None:
        """Give up the memory of weights that are here; `load_weights` takes it again."""
        self._dropped.drop(self._model.module.parameters())
        self.version = RELEASED

    def load(self, folder: Path) -> None:
        """Take the weights that `TrainEngine.save` wrote, and their version."""
        read_into(self._model.module, folder, "lm")
        self.weights_changed(read_counters(folder).version)

    def weights_changed(self, version: int) -> None:
        """Requests go on under the new weights, their caches recomputed; tokens from here on carry `version`."""
        self._forget()
        self._model.weights_changed()
        self.version = version

    def release(self) -> None:
        """Give the cache's memory back, and that of weights that wait in host memory; running sequences are prefilled
        again by the next step."""
        self._forget()
        self._pool.shrink()
        self._model.release()
        self._use.close()

    def offload(self) -> None:
        """Weights, which nobody changes, wait in host memory from now on, and from each `release` to the next step."""
        self._states = HostStates(self._model.module.parameters)

    def _forget(self) -> None:
        """Forgets what the cache holds: it is of no use any more."""
        self._ready = 0
        for sequence in (*self._running, *self._aside):
            sequence.cached = 0

    # --- slots and pages ----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Before a step: a page for every newest token that begins one. Where too few are free, the youngest sequences
        go back to the queue."""
        while True:
            n = len(self._running)
            starting = [s for s in self._slots.at_page_start(n) if not self._has_room(self._running[s])]
            if len(starting) <= self._pool.available:
                break
            if self._reclaim():
                continue
            youngest = min(range(n), key=lambda slot: len(self._running[slot].versions))
            self._waiting.appendleft(self._running[youngest])
            self._keep([slot for slot in range(n) if slot != youngest])
        for slot, page in zip(starting, self._pool.take(len(starting)), strict=True):
            pages = self._running[slot].pages
            self._slots.add_page(slot, len(pages), page)
            pages.append(page)

    def _reclaim(self) -> bool:
        """Free the pages of what is set aside. False where there are none."""
        held = [sequence for sequence in self._aside if sequence.pages]
        for sequence in held:
            self._pool.give_back(sequence.pages)
            sequence.pages, sequence.cached = [], 0
        return bool(held)

    @staticmethod
    def _has_room(sequence: RunningSequence) -> bool:
        return len(sequence.pages) >= pages_for(len(sequence.tokens))

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served, as far as pages and this step's prefill go."""
        tokens = 0
        known = {s.key: s for s in self._running}
        states: dict[tuple[int, ...], int] = {}
        while self._waiting and len(self._running) < self._most_slots:
            sequence = self._waiting[0]
            donor = known.get(sequence.key)
            common: list[int] = []
            if donor is not None and donor.request.prompt == sequence.request.prompt:
                common = donor.pages[: shared_pages(len(sequence.request.prompt))]
            own = pages_for(len(sequence.tokens)) - len(common)
            growth = pages_for(len(self._running) * _STEPS_AHEAD)
            cost = len(sequence.tokens) - (len(sequence.request.prompt) if donor is not None else 1)
            if own + growth > self._pool.available and not self._running and self._reclaim():
                continue
            if own + growth > self._pool.available or (tokens and tokens + cost > self._limits.prefill_tokens):
                break
            tokens += cost
            self._waiting.popleft()
            sequence.pages = [*self._pool.share(common), *self._pool.take(own)]
            known.setdefault(sequence.key, sequence)
            # running slots have smaller numbers: see Slots.advance
            state = states.setdefault(tuple(sequence.tokens), self._most_slots + len(states))
            self._slots.put(len(self._running), sequence, state)
            self._running.append(sequence)

    def _keep(self, order: Sequence[int]) -> None:
        """Slots `order` live on, in this order; the others are free, and so are their pages."""
        if list(order) == list(range(len(self._running))):
            return
        kept = set(order)
        for slot, sequence in enumerate(self._running):
            if slot not in kept:
                self._pool.give_back(sequence.pages)
                sequence.pages, sequence.cached = [], 0
        self._slots.arrange(order)
        self._running = [self._running[slot] for slot in order]
        self._ready = min(self._ready, len(order))

    # --- a step -------------------------------------------------------------------------------------------------------

    def _logits(self) -> Tensor | None:
        """[n, V] for the next token of each slot: decoded, or given by the prefill; None in stages before the last."""
        prefilled = self._prefill.logits(self._running, self._ready)
        n = self._ready if prefilled is not None else len(self._running)
        if not n:
            assert prefilled is not None
            return prefilled
        slots = self._slots
        decoded = self._model.decode(slots.newest[:n], slots.position[:n], slots.pages(n), slots.state[:n])
        return decoded if prefilled is None or decoded is None else torch.cat([decoded, prefilled])

    def _collect(self, tokens: list[int], logprobs: list[float]) -> list[Completion]:
        """Append what was drawn; take out what has ended."""
        done: list[Completion] = []
        alive: list[int] = []
        version = self.version
        if math.isnan(sum(logprobs)):
            broken = next(s for s, logprob in zip(self._running, logprobs, strict=True) if math.isnan(logprob))
            self.release()  # keys may be NaN, too, and pages are read beyond what is valid
            raise FloatingPointError(f"request {broken.request.id}: the model's logits are NaN")
        self._ready = len(self._running)
        self._slots.advance(tokens, self._model.vocabulary)
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
                self._ids.discard(request.id)
            else:
                alive.append(slot)
        if done:
            self._keep(self._slots.longest_first(alive))
        return done
