"""The models of one worker: which engine serves which call, over which copy of a role's weights. Worker side.

Knows engines by their interfaces alone; `engines.py` opens them. Copies follow the plan (`planner/plan/residency.py`):
a call whose layout is that of the trained copy reads it in place; another has a copy of its own, which a reallocation
brings or refreshes, and which is given up after use where its devices run other calls.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from realgraph.graphs.applied import applied_of
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.spec import Generate, ModelRole, Train
from realgraph.planner.inputs.model_spec import Head, ModelSpec, spec_from_config
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.residency import Copy, copies, dropped_copies
from realgraph.planner.request.engine_support import TORCH_KIND
from realgraph.runtime.engine import (
    RELEASED,
    Decode,
    LostPart,
    OwnWeights,
    Parts,
    RolloutEngine,
    RolloutLimits,
    Snapshot,
    TrainEngine,
    TrainSettings,
    WeightSource,
    WeightSpec,
)
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.job.job import Job
from realgraph.runtime.models.weights import read_config, resolve
from realgraph.runtime.parallel.checksums import Checksums
from realgraph.runtime.parallel.exchange import Reallocation, WorkerParts, layout_boxes, reallocation
from realgraph.runtime.parallel.groups import Collectives, Ranks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.shares import Shares, shares
from realgraph.runtime.wire.protocol import ArrivedBytes, HeldBytes
from realgraph.runtime.worker.engines import ENGINES

MAX_LOGPROB_GAP = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # mean nats a sampled token


def role_path(models: Mapping[str, ModelRole], role: str) -> str:
    """The source of a role's first weights: its own path, or that of the role it starts as. Raises ConfigError."""
    name: str | None = role
    while name is not None:
        path = models[name].path
        if path is not None:
            return path
        name = models[name].init
    text = f"the role {role!r} has no weights to start from"
    raise ConfigError([Problem(Where(path=f"$.models.{role}.path"), text, "give it a path, or init: another role")])


def logprob_limit(job: Job, role: str) -> float:
    """Mean difference of log-probabilities, in nats, that generator and trainer of `role` may have."""
    return job.runtime.max_logprob_gap or MAX_LOGPROB_GAP[job.graph.models[role].dtype]


class Roles:
    """Engines of this worker by call. Making it is collective: every worker makes its part in the same order.

    notify: called, from any thread, whenever a rollout engine has something to take.
    """

    def __init__(
        self, job: Job, worker: int, collectives: Collectives, decode: Decode, notify: Callable[[], None]
    ) -> None:
        self._job, self._worker, self._collectives = job, worker, collectives
        self._kind, self._decode, self._notify = ENGINES[TORCH_KIND], decode, notify
        self.trained: dict[str, TrainEngine] = {}  # by role
        self.engines: dict[str, TrainEngine] = {}  # by call, of those that work on packed batches
        self.rollouts: dict[str, RolloutEngine] = {}  # by generate call
        self._led: dict[str, bool] = {}  # generate call -> this worker heads its replica
        self._in_place: dict[str, TrainEngine] = {}  # generate call -> whose weights its engine reads
        # trained role -> references that follow it, with their layouts
        self._averaged: dict[str, list[tuple[Layout, TrainEngine]]] = {}
        self.saved: dict[str, TrainEngine] = {}
        self._changing: list[
            tuple[str, TrainEngine | RolloutEngine]
        ] = []  # copies of the roles that a checkpoint holds
        self._kept: dict[str, Snapshot] = {}
        self._keeping = threading.Lock()
        self._reallocations: dict[_Between, _Route] = {}
        # call -> its states, which come before it from host memory, and their bytes
        self._early: dict[str, tuple[ExitStack, int]] = {}
        role_copies = copies(job.graph, job.plan.allocations)
        self._trained_layouts = {copy.role: copy.layout for copy in role_copies if copy.trained}
        # call -> the calls that use its copy, which is given up after it
        self._dropped = dropped_copies(job.graph, job.plan.allocations, job.plan.staleness)
        for copy in role_copies:
            if worker in copy.layout.mesh.devices:
                self._open(copy)
                if copy.calls[0] in self._dropped:
                    self.release(copy.calls[0])

    def _open(self, copy: Copy) -> None:
        job, role = self._job, self._job.graph.models[copy.role]
        packed = [name for name in copy.calls if not isinstance(job.graph.calls[name], Generate)]
        averaged = role.ema_rate is not None and role.init is not None
        engine = self._open_train(copy, packed) if packed or averaged else None
        for name in copy.calls:
            if isinstance(job.graph.calls[name], Generate):
                self._open_rollout(name, copy, engine)
        changes = any(isinstance(call, Train) and call.model == copy.role for call in job.graph.calls.values())
        if engine is None:
            if changes:
                self._changing += [(copy.role, self.rollouts[name]) for name in copy.calls]
            return
        self.engines |= dict.fromkeys(packed, engine)
        if averaged or changes:
            self._changing.append((copy.role, engine))
        if copy.trained:
            self.trained[copy.role] = self.saved[copy.role] = engine
        elif role.ema_rate is not None and role.init is not None:
            self._averaged.setdefault(role.init, []).append((copy.layout, engine))
            self.saved[copy.role] = engine

    def _open_train(self, copy: Copy, packed: Sequence[str]) -> TrainEngine:
        """The engine of the calls `packed` that read or train this copy. Collective."""
        job = self._job
        path = role_path(job.graph.models, copy.role)
        ranks = self._collectives.of_layout(copy.layout)
        return self._kind.open_train(
            job.graph.models[copy.role], path, copy.layout, ranks, self._settings(copy, packed)
        )

    def _open_rollout(self, name: str, copy: Copy, beside: TrainEngine | None) -> None:
        """The engine of a generate call: over the weights of the engine beside it, where there is one."""
        job = self._job
        planned = job.plan.allocations[name]
        limits = RolloutLimits(
            max_running=job.batch.max_running or planned.running or None,
            max_cache_tokens=planned.kv_cache_tokens,
        )
        weights: WeightSource
        if beside is not None:
            weights, self._in_place[name] = beside.shared_weights(), beside
        else:
            device, away = self._collectives.member.device, planned.residency == "offloaded"
            weights = OwnWeights(role_path(job.graph.models, copy.role), device, offloaded=away)
        role = job.graph.models[copy.role]
        ranks = self._collectives.of_layout(copy.layout)
        self.rollouts[name] = self._kind.open_rollout(role, weights, limits, self._decode, self._notify, ranks)
        self._led[name] = ranks.heads

    def _settings(self, copy: Copy, packed: Sequence[str]) -> TrainSettings:
        job = self._job
        tokens = min((job.plan.allocations[name].tokens for name in packed), default=None)
        away = all(job.plan.allocations[name].residency == "offloaded" for name in copy.calls)
        if not copy.trained:
            return TrainSettings(max_tokens_per_microbatch=tokens, offloaded=away)
        calls = {name: call for name, call in job.graph.calls.items() if isinstance(call, Train)}
        trains = [call for call in calls.values() if call.model == copy.role]
        generator = next((call.model for call in job.graph.calls.values() if isinstance(call, Generate)), "")
        generator_trains = sum(call.model == generator for call in calls.values())
        # what frozen weights sampled, or came with the data, never gets too old
        ages = bool(generator_trains) and job.staleness > 0 and job.overdue == "mask"
        samples = copy.role == generator and any(BEHAVIOUR_LOGPROBS in job.graph.reads[name] for name in copy.calls)
        own = {name: call for name, call in calls.items() if call.model == copy.role}
        applied = {f"{entry.path}.fn": entry.fn for entry in applied_of(own)}
        return TrainSettings(
            max_tokens_per_microbatch=tokens,
            optimizer=trains[0].optimizer,
            total_steps=job.steps * sum(call.minibatches * call.epochs for call in trains),
            max_logprob_gap=logprob_limit(job, copy.role) if samples else None,
            max_age=job.staleness if ages else None,
            trains=len(trains),
            generator_trains=max(1, generator_trains),
            functions=load_applied(applied, job.user_dir),
            offloaded=away,
            shared=not away and self._sends(copy.role),
        )

    def _sends(self, role: str) -> bool:
        """The trained weights of `role` go to other copies, of which some may lie on other workers."""
        roles = [role, *(name for name, one in self._job.graph.models.items() if one.init == role and one.ema_rate)]
        others = [one for one in copies(self._job.graph, self._job.plan.allocations) if not one.trained]
        return self._collectives.member.n_workers > 1 and any(one.role in roles for one in others)

    def load(self, checkpoint: RunPath) -> None:
        """Take back the states of a checkpoint into every copy of them, as if all had just been reallocated; those that
        were given up come by reallocation."""
        for name, engine in self._changing:
            if engine.version != RELEASED:
                engine.load(checkpoint / name)
        for engine in {id(engine): engine for engine in self._in_place.values()}.values():
            self.weights_changed(engine)

    def save(self, folder: RunPath) -> None:
        """Write this worker's share of every state that training changes."""
        for name, engine in self.saved.items():
            engine.save(folder / name)

    def keep(self, role: str) -> None:
        """Before `role` is trained: keep its state, and that of references that follow it, for a rescue."""
        with self._keeping:
            for name, engine in self.saved.items():
                if self._followed(name) == role:
                    self._kept[name] = engine.snapshot()

    def rescue(self, folder: RunPath, versions: Mapping[str, int], writers: Sequence[int]) -> None:
        """Write this worker's share of the states as of `versions` (of the trained roles), where of all workers only
        `writers` are left; from any thread.

        Raises OSError where this worker has no state of that version, LostPart where a part of one is nowhere.
        """
        for name, engine in self.saved.items():
            if self._followed(name) not in versions:
                continue
            version = versions[self._followed(name)]
            with self._keeping:  # training begins by `keep`: while this holds, live weights do not move under us
                kept = self._kept.get(name)
                state = kept if kept is not None and kept.version == version else engine.snapshot()
            if state.version != version:
                raise OSError(f"this worker has no state of {name!r} at version {version}")
            try:
                state.write(folder / name, writers)
            except LostPart as error:
                raise LostPart(f"a part of {name!r} is gone: {error}") from None

    def _followed(self, name: str) -> str:
        """The trained role whose training changes `name`: itself, or the one that a reference follows."""
        init = self._job.graph.models[name].init
        return init if name not in self.trained and init else name

    def n_parameters(self) -> dict[str, int]:
        """Parameters of every role on this worker (of a shard: of the whole model)."""
        engines: Mapping[str, TrainEngine | RolloutEngine] = {**self.engines, **self.rollouts}
        return {
            self._job.graph.role(call): sum(math.prod(spec.shape) for spec in engine.weight_specs())
            for call, engine in engines.items()
        }

    def leads(self, call: str) -> bool:
        """This worker takes the requests of the generate call `call`; the others of its replica follow."""
        return self._led[call]

    def sharing_ranks(self, role: str) -> tuple[Ranks, ...]:
        """The workers along each axis, this one among them, that pass the same samples through the trained copy of
        `role`."""
        ranks = self._collectives.of_layout(self._trained_layouts[role])
        return ranks.tp, ranks.cp, ranks.pp

    def reads_in_place(self, call: str, engine: TrainEngine) -> bool:
        """The generate call `call` reads the weights of `engine`, as they are at any time."""
        return self._in_place.get(call) is engine

    def weights_changed(self, engine: TrainEngine) -> None:
        """Generators that read the weights of `engine` drop what they cached under the old ones."""
        for name, rollout in self.rollouts.items():
            if self.reads_in_place(name, engine) and rollout.version != engine.version:
                rollout.switch(engine.version)

    def release(self, call: str) -> None:
        """After a use of `call`: give up the caches of its generators, and the weights of a copy that is brought again
        before the next use. Every worker of the call does it alike."""
        users = self._dropped.get(call, ())
        for name in users:
            engine = self.engines.get(name)
            if engine is not None:
                engine.release()
        for name in users or (call,):
            rollout = self.rollouts.get(name)
            if rollout is not None:
                rollout.release(weights=bool(users))

    @contextmanager
    def prefetching(self, call: str) -> Iterator[int]:
        """Round a call: what the plan brings while it runs begins to come, and what came for it leaves after it; yields
        the bytes of that. One that has the device first sends back to host memory what came early for others."""
        allocations = self._job.plan.allocations
        if call in allocations:
            self.end_prefetches(but=call)
        for name, allocation in allocations.items():
            if name in self.engines and allocation.prefetch_during == call:
                stack = ExitStack()
                self._early[name] = stack, stack.enter_context(self.engines[name].prefetched())
        came, nbytes = self._early.pop(call, (ExitStack(), 0))
        with came:
            yield nbytes

    def end_prefetches(self, but: str = "") -> None:
        """States that came early go back to host memory, those for the call `but` left aside."""
        for name in [name for name in self._early if name != but]:
            self._early.pop(name)[0].close()

    def average(self, role: str) -> None:
        """Move the references that follow `role` towards it. Collective."""
        trained = self.trained[role]
        for layout, reference in self._averaged.get(role, ()):
            rate = reference.role.ema_rate
            assert rate is not None
            between = _Between(role, (self._trained_layouts[role], layout))
            with self._moved(between, trained) as parts:
                reference.average_weights(parts, rate, trained.version)
            self.weights_changed(reference)

    def held_bytes(self, call: str) -> HeldBytes | None:
        """Bytes of this worker's copy for `call`; None where it has none."""
        engine = self._in_place.get(call) or self.engines.get(call) or self.rollouts.get(call)
        return engine.held_bytes() if engine is not None else None

    def reallocate(self, role: str, call: str, version: int, owners: tuple[int, ...]) -> ArrivedBytes:
        """Copy the trained weights to this worker's copy for `call`. Owners and receivers all call it. Returns what has
        come from other workers.

        Each receives what it lacks from those that hold it; beside its own parts nobody has more than a few buckets.
        """
        engine, rollout = self._in_place.get(call) or self.engines.get(call), self.rollouts.get(call)
        owner = self.trained[role] if self._worker in owners else None
        source = owner or engine or rollout
        assert source is not None, "neither an owner nor a receiver"
        between = _Between(role, (self._trained_layouts[role], self._job.plan.allocations[call].layout))
        before = self._reallocation(between, source.weight_specs()).mapped.arrivals.total
        receives = self._worker in between.layouts[1].mesh.devices
        with self._moved(between, source) as parts:
            if receives and engine is not None:
                engine.load_weights(parts, version)
            elif receives and rollout is not None:
                rollout.prepare(parts)
            else:
                for _ in parts:
                    pass  # only sends
        if receives and rollout is not None:
            rollout.switch(version)
        after = self._reallocations[between].mapped.arrivals.total
        return ArrivedBytes(after.near - before.near, after.far - before.far)

    @contextmanager
    def _moved(self, between: "_Between", source: TrainEngine | RolloutEngine) -> Iterator[Parts]:
        """The parts that come to this worker, while it sends those that others lack. Collective over both layouts.

        source: the engine here that has the trained weights, else the one that they come to.
        """
        shapes = {spec.name: spec.shape for spec in source.weight_specs()}
        moves, route, shown = self._reallocation(between, source.weight_specs())
        owner = self.trained.get(between.role)
        with owner.held_parts() if owner is not None else nullcontext({}) as held:
            segment = owner.segment if owner is not None else None
            place = WorkerParts(self._worker, source.device, held, moves.wants.get(self._worker, {}), segment)
            if not self._job.runtime.verify_weights:
                yield route.bring(place)
                return
            sums = Checksums(moves, place, shapes, shown)
            yield sums.watch(route.bring(place))
            sums.compare()

    def _reallocation(self, between: "_Between", specs: Sequence[WeightSpec]) -> "_Route":
        """A reallocation, its messages and shares alike on all workers; made once."""
        if between not in self._reallocations:
            shapes, (dtype,) = {spec.name: spec.shape for spec in specs}, {spec.dtype for spec in specs}
            member, model = self._collectives.member, self._model_of(between.role)
            moves = reallocation(shapes, dtype, between.layouts, member, model)
            held = layout_boxes(shapes, between.layouts[0], model)
            shown = shares(held, shapes) if self._job.runtime.verify_weights else {}
            self._reallocations[between] = _Route(moves, MappedRoute(moves, self._worker, member.host), shown)
        return self._reallocations[between]

    def _model_of(self, role: str) -> tuple[ModelSpec, Head]:
        """The shape of a role's model, which says how layouts cut it."""
        config = read_config(resolve(role_path(self._job.graph.models, role)))
        return spec_from_config(config, Where()), self._job.graph.models[role].head


class _Between(NamedTuple):
    """The two sides of a reallocation: the role whose trained weights go, and the layouts."""

    role: str
    layouts: tuple[Layout, Layout]


class _Route(NamedTuple):
    """A reallocation: what goes to whom, how it gets to this worker, and the boxes that each sender's checksums are
    of."""

    moves: Reallocation
    mapped: MappedRoute
    shown: Shares
