"""Continuous batching over one paged key-value cache: one decode step after the other, by the caller's thread.

Owns the requests that run and wait, and the cache. Knows no tokenizer, no group, no thread and no process; a
transformers causal language model does the forward passes, and is left as it was found.

The invariant of a slot: the cache holds every token but the newest, which the next decode step reads. Samples of one
prompt share its full pages. Where no page is free, the youngest sequence gives its own back and waits with its tokens.
Slots without a valid cache are the last ones.

Over pipeline stages the sequences are dealt to as many lanes as stages. A step is a round of passes, one of each lane:
what was drawn for a lane in the round before is taken in, and its next pass begins, while those of the others are on
later stages. All stages do the same in the same order, so that each knows what the others hold.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from realgraph.planner.costs.memory.terms import CACHE_SPARE_TOKENS
from realgraph.planner.request.engine_support import TORCH
from realgraph.runtime.attention.pages import PAGE_TOKENS, PagePool, pages_for
from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.engine import RELEASED, CacheUse, Completion, Decode, Request, RolloutLimits
from realgraph.runtime.generate.cached_model import CachedModel
from realgraph.runtime.generate.prefill import AdmissionDelay, Prefill, shared_pages
from realgraph.runtime.generate.request_bounds import RequestBounds
from realgraph.runtime.generate.slots import Flight, RunningSequence, SequenceLane, Slots, watched
from realgraph.runtime.models.rollout_weights import RolloutWeights
from realgraph.runtime.parallel.experts.kept import route_notes
from realgraph.runtime.parallel.pipeline.rollout import StagedPass


class ContinuousBatch:
    """The sequences that a transformers causal language model of this process decodes. One thread at a time may use it.

    The module may be shared with a train engine: its attention function and training flags are borrowed during `step`
    only. decode: token ids to text, needed for stop strings alone. keeps_routes: completions have `routes`. Raises
    ValueError for a model with attention other than causal, full or sliding, or without the experts to keep.
    """

    def __init__(
        self,
        module: nn.Module,
        limits: RolloutLimits | None = None,
        *,
        decode: Decode | None = None,
        version: int = 0,
        source: Path | None = None,
        keeps_routes: bool = False,
    ) -> None:
        self.version, self.source = version, source
        self._limits = limits or RolloutLimits()
        self._model = CachedModel(module, self._limits.cuda_graphs)
        self.weights = RolloutWeights(module)
        self.device = self._model.device
        self._decode_text = decode
        self._waiting: deque[RunningSequence] = deque()
        self._aside: list[RunningSequence] = []  # those that wait with their pages while others run
        self._ids: set[int] = set()
        on_cpu = self.device.type == "cpu"
        self._most_slots = self._limits.max_running or TORCH.max_running
        most_tokens, cache_tokens = self._limits.max_length or self._model.max_length, self._limits.max_cache_tokens
        self._bounds = RequestBounds(self._model.vocabulary, most_tokens, cache_tokens, decode is not None)
        # a GPU's graphs are lost with the cache they were captured on
        self._pool = PagePool(None if cache_tokens is None else pages_for(cache_tokens), at_once=not on_cpu)
        self._notes = route_notes(module) if keeps_routes else None
        self._prefill = Prefill(self._model, self._limits.prefill_tokens, self._notes)
        self._delay = AdmissionDelay()
        self._lanes = [SequenceLane(Slots(self._most_slots, self.device)) for _ in range(self._model.lanes)]

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
        for request in requests:
            routes = None if self._notes is None else self._notes.sequence(request.prompt)
            self._waiting.append(RunningSequence.of(request, routes))
        self._ids.update(ids)

    def abort(self, ids: Sequence[int]) -> None:
        """Forget these requests, running or queued; ids that are not here (finished before) are passed over. No pass is
        under way."""
        gone = self._ids.intersection(ids)
        if not gone:
            return
        self._ids -= gone
        self._waiting = deque(s for s in self._waiting if s.request.id not in gone)
        for lane in self._lanes:
            self._keep(lane, [slot for slot, s in enumerate(lane.running) if s.request.id not in gone])

    def drawn(self, since: Mapping[int, int]) -> list[DrawnTokens]:
        """See `RolloutEngine.drawn`."""
        here = (s for s in (*self._running, *self._waiting, *self._aside) if s.request.id in since)
        return [s.drawn(since[s.request.id]) for s in here if len(s.versions) > since[s.request.id]]

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for each running sequence, return what finished; over several lanes the
        passes are under way afterwards (`settle`). Collective over replicas that share experts, with sequences or
        without.

        Raises FloatingPointError where the model's logits are NaN; nothing is drawn then.
        """
        self.weights.bring()
        done: list[Completion] = []
        with self._model.borrowed(), self._called_back():
            admits = self._admits()
            for number, lane in enumerate(self._lanes):
                done += self._land(lane)
                self._make_room(lane)
                if not (admits and self._admit(lane)) and len(self._lanes) > 1:
                    self._even_out(number)
                if lane.running:
                    self._take_off(lane)
            self._model.finish_passes()
            if len(self._lanes) == 1:
                done += self._land(self._lanes[0])
        return done

    @property
    def under_way(self) -> bool:
        """Passes have begun whose draws have not been taken in."""
        return any(lane.flight is not None for lane in self._lanes)

    def settle(self) -> list[Completion]:
        """End the passes that are under way; returns what they finished. Collective over the stages."""
        with self._called_back():
            done = [completion for lane in self._lanes for completion in self._land(lane)]
        self._model.finish_transfers()
        return done

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, there is no request, and others may come; what is left of those is forgotten. Afterwards the requests
        from before go on as if nothing had been; only where the others need their pages are their caches recomputed."""
        running, waiting, ids, before = self._running, self._waiting, self._ids, self._aside
        lanes = [(lane.running, lane.slots.state[: len(lane.running)].tolist(), lane.ready) for lane in self._lanes]
        self._waiting, self._ids, self._aside = deque(), set(), [*before, *running]
        for lane in self._lanes:
            lane.running, lane.ready = [], 0
        try:
            yield
        finally:
            for lane in self._lanes:
                self._keep(lane, [])
            self._aside, self._waiting, self._ids = before, waiting, ids
            if all(sequence.pages for sequence in running):
                for lane, (sequences, states, ready) in zip(self._lanes, lanes, strict=True):
                    for sequence, state in zip(sequences, states, strict=True):
                        lane.put(sequence, state)
                    lane.ready = ready if all(sequence.cached for sequence in sequences) else 0
            else:
                self._waiting.extendleft(reversed(running))

    @property
    def _running(self) -> list[RunningSequence]:
        """Those of all lanes, lane by lane."""
        return [sequence for lane in self._lanes for sequence in lane.running]

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._waiting and not self.running

    @property
    def running(self) -> int:
        """Sequences that decode."""
        return sum(len(lane.running) for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Sequences that have not begun, or gave their pages to older ones."""
        return len(self._waiting)

    @property
    def drawn_tokens(self) -> int:
        """Tokens of all that decode, with their prompts'."""
        return sum(len(sequence.tokens) for sequence in self._running)

    @property
    def free_cache_tokens(self) -> int | None:
        """Tokens that its pages have room for beside those that are held; None: without a bound."""
        free = self._pool.available
        return None if math.isinf(free) else int(free) * PAGE_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key-value cache occupies on the device."""
        return self._model.cache.nbytes

    def drop_weights(self) -> None:
        """Give up the memory of the weights."""
        self.weights.drop()
        self.version = RELEASED

    def weights_changed(self, version: int, cache: CacheUse = "recompute") -> None:
        """Requests go on under the new weights; tokens from here on carry `version`. See `RolloutEngine.switch`."""
        if cache == "recompute":
            self._forget()
        self._model.weights_changed()
        self.version = version

    def release(self) -> None:
        """Give the cache's memory back, and that of weights that wait in host memory; running sequences are prefilled
        again by the next step."""
        self._forget()
        self._pool.shrink()
        self._model.release()
        self.weights.leave()

    def _forget(self) -> None:
        """Forgets what the cache holds: it is of no use any more."""
        for lane in self._lanes:
            lane.ready = 0
        for sequence in (*self._running, *self._aside):
            sequence.cached = 0

    # --- slots and pages ----------------------------------------------------------------------------------------------

    def _make_room(self, lane: SequenceLane) -> None:
        """Before a pass: a page for every newest token that begins one. Where too few are free, the youngest sequences
        of all lanes go back to the queue."""
        while True:
            starting = [s for s in lane.slots.at_page_start(len(lane.running)) if not self._has_room(lane.running[s])]
            if len(starting) <= self._pool.available:
                break
            if self._reclaim():
                continue
            youngest = min(self._running, key=lambda sequence: len(sequence.versions))
            its = next(each for each in self._lanes if youngest in each.running)
            self._waiting.appendleft(youngest)
            # what a pass that is under way draws for it is forgotten, and drawn again
            self._keep(its, [slot for slot, sequence in enumerate(its.running) if sequence is not youngest])
        for slot, page in zip(starting, self._pool.take(len(starting)), strict=True):
            pages = lane.running[slot].pages
            lane.slots.add_page(slot, len(pages), page)
            pages.append(page)

    def _reclaim(self) -> bool:
        """Free the pages of what is set aside. False where there are none."""
        with_pages = [sequence for sequence in self._aside if sequence.pages]
        for sequence in with_pages:
            self._pool.give_back(sequence.pages)
            sequence.pages, sequence.cached = [], 0
        return bool(with_pages)

    @staticmethod
    def _has_room(sequence: RunningSequence) -> bool:
        return len(sequence.pages) >= pages_for(len(sequence.tokens))

    def _admits(self) -> bool:
        """Waiting requests begin with this step: some are prefilled anyhow, or enough could join them."""
        running, waiting = self.running, len(self._waiting)
        could_join = min(waiting, self._most_slots - running)
        if could_join and not math.isinf(self._pool.available):
            free = self._pool.available - pages_for(running * CACHE_SPARE_TOKENS)
            could_join = min(could_join, max(0, int(free)) // pages_for(len(self._waiting[0].tokens)))
        prefills = any(lane.ready < len(lane.running) for lane in self._lanes)
        return self._delay.ends(could_join, waiting, running) or prefills

    def _admit(self, lane: SequenceLane) -> bool:
        """Give free slots to waiting requests, first come first served, as far as pages, this pass's prefill and the
        lane's share go. True where any got one."""
        tokens, before = 0, len(lane.running)
        known = {s.key: s for s in self._running if s.shares(self.version)}
        states: dict[tuple[int, ...], int] = {}
        running = self.running
        share = self._share_of(min(running + len(self._waiting), self._most_slots))
        while self._waiting and running < self._most_slots and len(lane.running) < share:
            sequence = self._waiting[0]
            donor = known.get(sequence.key)
            common: list[int] = []
            if donor is not None and donor.request.prompt == sequence.request.prompt:
                common = donor.pages[: shared_pages(len(sequence.request.prompt))]
            own = pages_for(len(sequence.tokens)) - len(common)
            growth = pages_for(running * CACHE_SPARE_TOKENS)
            cost = len(sequence.tokens) - (len(sequence.request.prompt) if donor is not None else 1)
            if own + growth > self._pool.available and not running and self._reclaim():
                continue
            if own + growth > self._pool.available or (tokens and tokens + cost > self._limits.prefill_tokens):
                break
            tokens += cost
            running += 1
            self._waiting.popleft()
            sequence.pages = [*self._pool.share(common), *self._pool.take(own)]
            known.setdefault(sequence.key, sequence)
            # running slots have smaller numbers: see Slots.advance
            lane.put(sequence, states.setdefault(tuple(sequence.tokens), self._most_slots + len(states)))
        return len(lane.running) > before

    def _share_of(self, sequences: int) -> int:
        """A lane's, of so many."""
        return -(-sequences // len(self._lanes))

    def _even_out(self, number: int) -> None:
        """A lane with more sequences than its share leaves the last ones to those with fewer, the next one first."""
        lane, share = self._lanes[number], self._share_of(self.running)
        for other in (*self._lanes[number + 1 :], *self._lanes[:number]):
            surplus = min(len(lane.running) - share, share - len(other.running))
            if surplus > 0:
                other.take_over(lane.keep(range(len(lane.running) - surplus)))

    def _keep(self, lane: SequenceLane, order: Sequence[int]) -> None:
        """Slots `order` of a lane live on, in this order; the others are free, and so are their pages."""
        for sequence in lane.keep(order):
            self._pool.give_back(sequence.pages)
            sequence.pages, sequence.cached = [], 0

    # --- a step -------------------------------------------------------------------------------------------------------

    def _take_off(self, lane: SequenceLane) -> None:
        """Begin a pass of a lane."""
        self._model.cache.reserve(self._pool.total)
        n, slots = len(lane.running), lane.slots
        draws = self._model.draw(self._logits(lane), slots.settings(n), slots.next_positions(n))
        lane.flight = Flight(tuple(lane.running), draws)

    def _logits(self, lane: SequenceLane) -> Tensor | StagedPass:
        """[n, V] for the next token of each slot: decoded, or given by the prefill; in stages the pass of them."""
        pending = lane.running[lane.ready :]
        prefilled = self._prefill.logits(pending, self._running, self.version) if pending else None
        n = lane.ready if prefilled is not None else len(lane.running)
        if not n:
            assert prefilled is not None
            return prefilled
        slots = lane.slots
        spans = [(position, 1) for position in slots.position[:n].tolist()]
        around = watched(self._notes, lane.running[:n], spans)
        decoded = self._model.decode(slots.newest[:n], slots.position[:n], slots.pages(n), slots.state[:n], around)
        return decoded if prefilled is None or isinstance(decoded, StagedPass) else torch.cat([decoded, prefilled])

    def _land(self, lane: SequenceLane) -> list[Completion]:
        """Append what the pass of a lane has drawn; take out what has ended. Waits for it."""
        if lane.flight is None:
            return []
        flight, lane.flight = lane.flight, None
        tokens, logprobs = flight.draws.take()
        if math.isnan(sum(logprobs)):
            broken = next(s for s, logprob in zip(flight.rows, logprobs, strict=True) if math.isnan(logprob))
            raise FloatingPointError(f"request {broken.request.id}: the model's logits are NaN")
        here = set(lane.running)
        drawn = [each for each in zip(flight.rows, tokens, logprobs, strict=True) if each[0] in here]
        done: list[tuple[RunningSequence, bool]] = []
        alive: list[int] = []
        lane.ready = len(drawn)
        lane.slots.advance([token for _, token, _ in drawn], self._model.vocabulary)
        for slot, (sequence, token, logprob) in enumerate(drawn):
            sequence.cached = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            request = sequence.request
            stopped = token in request.stop_tokens or bool(
                request.stop_strings and sequence.says_stop(self._decode_text)
            )
            if stopped or len(sequence.versions) == request.max_new_tokens:
                done.append((sequence, stopped))
                self._ids.discard(request.id)
            else:
                alive.append(slot)
        if done:
            joined = range(len(drawn), len(lane.running))  # since the pass began
            self._keep(lane, [*lane.slots.longest_first(alive), *joined])
        return self._completions(done)

    def _completions(self, done: Sequence[tuple[RunningSequence, bool]]) -> list[Completion]:
        """The samples of sequences that have ended; True: by themselves. Collective over stages that keep routes."""
        if self._notes is None:
            return [sequence.completion(stopped) for sequence, stopped in done]
        self._model.stages_meet()
        whole = self._notes.whole([sequence.routes for sequence, _ in done if sequence.routes is not None])
        return [sequence.completion(stopped, routes) for (sequence, stopped), routes in zip(done, whole, strict=True)]

    @contextmanager
    def _called_back(self) -> Iterator[None]:
        """Forgets what passes draw that are under way where logits are NaN inside."""
        try:
            yield
        except FloatingPointError:
            self._model.finish_passes()
            for lane in self._lanes:
                flight, lane.flight = lane.flight, None
                if flight is not None:
                    flight.draws.take()
            self._model.finish_transfers()
            self.release()  # keys may be NaN, too, and pages are read beyond what is valid
            raise
