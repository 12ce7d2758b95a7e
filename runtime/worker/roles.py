"""The models of one worker: which engine serves which call, over which copy of a role's weights. Worker side.

Knows engines by their interfaces alone; `engines.py` opens them. Copies follow the plan (`planner/plan/residency.py`):
a call whose layout is that of the trained copy reads it in place; another has a copy of its own, which a reallocation
brings or refreshes, and which is given up after use where its devices run other calls.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from msgspec.structs import replace

from realgraph.graphs.applied import applied_of
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.plan.axes import head_worker, is_head
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.residency import Copy, copies, dropped_copies
from realgraph.planner.request.engine_support import SGLANG_KIND, TORCH_KIND
from realgraph.runtime.engine import (
    RELEASED,
    CacheUse,
    Decode,
    OwnWeights,
    RolloutEngine,
    RolloutLimits,
    Snapshot,
    TrainEngine,
    TrainSettings,
    WeightSource,
)
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.job.job import Job
from realgraph.runtime.logprob_gap import logprob_limit
from realgraph.runtime.parallel.groups import Collectives, Ranks
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.train.errors import LostPart
from realgraph.runtime.weights.handover import WeightHandover
from realgraph.runtime.weights.movement import Between, Movement, role_path
from realgraph.runtime.weights.served import ServedCall
from realgraph.runtime.wire.metrics import ArrivedBytes, ResidentBytes
from realgraph.runtime.wire.protocol import Reallocate
from realgraph.runtime.worker.engines import ENGINES, Replica, open_server

Notify = Callable[[str], None]


class Roles:
    """Engines of this worker by call. Making it is collective: every worker makes its part in the same order.

    notify: called, from any thread, whenever the rollout engine of a call, which it gets, has something to take.
    """

    def __init__(
        self, job: Job, handover: WeightHandover, collectives: Collectives, decode: Decode, notify: Notify
    ) -> None:
        self._job, self._worker, self._collectives = job, (worker := collectives.member.worker), collectives
        self.handover = handover
        self._kind, self._decode, self._notify = ENGINES[TORCH_KIND], decode, notify
        self.trained: dict[str, TrainEngine] = {}  # by role
        self.engines: dict[str, TrainEngine] = {}  # by call, of those that work on packed batches
        self.rollouts: dict[str, RolloutEngine] = {}  # by generate call
        self._led: dict[str, bool] = {}  # generate call -> this worker heads its replica
        self._in_place: dict[str, TrainEngine] = {}  # generate call -> whose weights its engine reads
        # trained role -> references that follow it, with their layouts
        self._averaged: dict[str, list[tuple[Layout, TrainEngine]]] = {}
        self.saved: dict[str, TrainEngine] = {}  # copies of the roles that a checkpoint holds
        self._changing: list[tuple[str, TrainEngine | RolloutEngine]] = []
        self._kept: dict[str, Snapshot] = {}
        self._keeping = threading.Lock()
        self._movement = Movement(job, worker, collectives, self.trained)
        # call -> its states, which come before it from host memory, and their bytes
        self._early: dict[str, tuple[ExitStack, int]] = {}
        role_copies = copies(job.graph, job.plan.allocations)
        self._trained_layouts = trained = {copy.role: copy.layout for copy in role_copies if copy.trained}
        # call -> the calls that use its copy, which is given up after it
        self._dropped = dropped_copies(job.graph, job.plan.allocations, job.plan.staleness)
        # generate calls on servers, of a role that is trained
        self._served = {
            name: ServedCall(job, name, trained[job.graph.role(name)], collectives, self._movement, handover.mail)
            for name in job.graph.generates
            if job.rollout.engine == SGLANG_KIND and job.graph.role(name) in trained
            if not collectives.member.engine  # one that stands for a lost worker fetches what its server needs
        }
        # generate calls that read the weights of a train engine, on whatever workers
        self._reads_trained = {name for copy in role_copies if self._packed(copy) is not None for name in copy.calls}
        for copy in role_copies:
            if worker in copy.layout.mesh.devices:
                self._open(copy)
                if copy.calls[0] in self._dropped:
                    self.release(copy.calls[0])

    def _packed(self, copy: Copy) -> list[str] | None:
        """The calls that work on packed batches over this copy by a train engine; None where it takes none."""
        packed = [name for name in copy.calls if not isinstance(self._job.graph.calls[name], Generate)]
        return packed if packed or self._follows(copy.role) else None

    def _follows(self, role: str) -> bool:
        """True of a reference that moves towards a trained role."""
        spec = self._job.graph.models[role]
        return spec.ema_rate is not None and spec.init is not None

    def _open(self, copy: Copy) -> None:
        job, role = self._job, self._job.graph.models[copy.role]
        packed, averaged = self._packed(copy), self._follows(copy.role)
        engine = self._open_train(copy, packed) if packed is not None else None
        for name in copy.calls:
            if isinstance(job.graph.calls[name], Generate):
                self._open_rollout(name, copy, engine)
        changes = any(isinstance(call, Train) and call.model == copy.role for call in job.graph.calls.values())
        if engine is None:
            if changes:
                self._changing += [(copy.role, self.rollouts[name]) for name in copy.calls if name in self.rollouts]
            return
        self.engines |= dict.fromkeys(packed or (), engine)
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
        job, device, notify = self._job, self._collectives.member.device, partial(self._notify, name)
        if job.rollout.engine == SGLANG_KIND:
            assert beside is None, "a server shares its devices with no call"
            if not is_head(copy.layout, self._worker):
                return  # its server is that of its replica's head
            replica = Replica(name, role_path(job.graph.models, copy.role), self._worker, device)
            self.rollouts[name], self._led[name] = open_server(job, replica, self._decode, notify), True
            return
        planned = job.plan.allocations[name]
        limits = RolloutLimits(
            max_running=job.max_running(name),
            max_cache_tokens=planned.most_cache_tokens,
            own_stream=name != job.graph.generates[0],
        )
        weights: WeightSource
        if beside is not None:
            weights, self._in_place[name] = beside.shared_weights(), beside
        else:
            away, path = planned.residency == "offloaded", role_path(job.graph.models, copy.role)
            weights = OwnWeights(path, device, offloaded=away, beside=self.updates_beside(name))
        role = job.graph.models[copy.role]
        ranks = self._collectives.of_layout(copy.layout, name)
        self.rollouts[name] = self._kind.open_rollout(role, weights, limits, self._decode, notify, ranks)
        self._led[name] = ranks.heads

    def updates_beside(self, call: str) -> bool:
        """True where new weights come to the generate call `call` while it generates: to a copy of a stream's own, on
        CPUs, where it does not give memory up to other calls."""
        stream = self._job.plan.staleness > 0 and not self._job.gives_up_caches
        return stream and self._collectives.member.device.type == "cpu" and call not in self._reads_trained

    def _settings(self, copy: Copy, packed: Sequence[str]) -> TrainSettings:
        job = self._job
        tokens = min((job.plan.allocations[name].tokens for name in packed), default=None)
        away = all(job.plan.allocations[name].residency == "offloaded" for name in copy.calls)
        if not copy.trained:
            return TrainSettings(max_tokens_per_microbatch=tokens, offloaded=away)
        calls = {name: call for name, call in job.graph.calls.items() if isinstance(call, Train)}
        trains = [call for call in calls.values() if call.model == copy.role]
        own = {name: call for name, call in calls.items() if call.model == copy.role}
        sampler = next((of for name in own if (of := job.graph.sampler(name)) in job.graph.generates), "")
        generator = job.graph.role(sampler) if sampler else ""
        generator_trains = sum(call.model == generator for call in calls.values())
        # what frozen weights sampled, or came with the data, never gets older
        ages = job.staleness if generator_trains and job.staleness else None
        reads = {job.graph.plain(name, key) for name in copy.calls for key in job.graph.reads[name]}
        samples = copy.role == generator and BEHAVIOUR_LOGPROBS in reads
        drawn = job.plan.allocations[sampler].layout if samples else None
        applied = {f"{entry.path}.fn": entry.fn for entry in applied_of(own)}
        return TrainSettings(
            max_tokens_per_microbatch=tokens,
            optimizer=trains[0].optimizer,
            total_steps=job.steps * sum(call.minibatches * call.epochs for call in trains),
            max_logprob_gap=logprob_limit(job, copy.role) if samples else None,
            engines=tuple(head_worker(drawn, rank) for rank in range(drawn.dp)) if drawn is not None else (),
            mixed_caches=job.rollout.interrupt == "keep_kv",
            max_age=ages if job.overdue == "mask" else None,
            counted_ages=ages,
            trains=len(trains),
            generator_trains=max(1, generator_trains),
            functions=load_applied(applied, job.user_dir),
            offloaded=away,
            shared=not away and self._sends(copy.role),
        )

    @property
    def _cache(self) -> CacheUse:
        """The caches of samples under way when new weights come."""
        return "keep" if self._job.rollout.interrupt == "keep_kv" else "recompute"

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

    @property
    def device(self) -> torch.device:
        """This worker's."""
        return self._collectives.member.device

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
                rollout.switch(engine.version, self._cache)

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
            between = Between(role, (self._trained_layouts[role], layout))
            with self._movement.moved(between, trained) as moved:
                reference.average_weights(moved.parts, rate, trained.version)
            self.weights_changed(reference)

    def settle(self, role: str) -> None:
        """Before the weights of `role` change: wait until no other worker reads them. Raises CollectiveError with the
        one that is gone or far behind."""
        self._movement.settle(role)

    def resident_bytes(self, call: str) -> ResidentBytes | None:
        """Bytes of this worker's copy for `call`; None where it has none."""
        engine = self._in_place.get(call) or self.engines.get(call) or self.rollouts.get(call)
        return engine.resident_bytes() if engine is not None else None

    def reallocate(self, work: Reallocate) -> ArrivedBytes:
        """Copy the trained weights to this worker's copy for a call. Owners and receivers all call it. Returns what has
        come from other workers.

        Each receives what it lacks from those that hold it; beside its own parts nobody has more than a few buckets.
        """
        role, call, version = work.role, work.call, work.version
        engine, rollout = self._in_place.get(call) or self.engines.get(call), self.rollouts.get(call)
        owner = self.trained[role] if self._worker in work.owners else None
        if self._worker in work.joined:
            return self._fetch(work, rollout) if rollout is not None else ArrivedBytes()  # a server is its head's
        if owner is not None:
            self._movement.hand_over(self.handover, work, self._trained_layouts[role])
        layout, receivers = self._job.plan.allocations[call].layout, frozenset(work.receivers).difference(work.joined)
        if not receivers:
            return ArrivedBytes()
        if call in self._served:
            assert rollout is None or isinstance(rollout, SglangEngine)
            return self._served[call].update(replace(work, receivers=tuple(sorted(receivers))), owner, rollout)
        source = owner or engine or rollout
        assert source is not None, "neither an owner nor a receiver"
        some = None if receivers == set(layout.mesh.devices) else receivers
        between = Between(role, (self._trained_layouts[role], layout), some)
        receives = self._worker in receivers
        with self._movement.moved(between, source) as moved:
            if receives and engine is not None:
                engine.load_weights(moved.parts, version)
            elif receives and rollout is not None:
                rollout.prepare(moved.parts)
            else:
                for _ in moved.parts:
                    pass  # only sends
            if receives and rollout is not None:
                rollout.switch(version, self._cache)
                if engine is None and moved.sums is not None:
                    moved.sums.count(rollout.checksums())
        return moved.arrived

    def _fetch(self, work: Reallocate, rollout: RolloutEngine) -> ArrivedBytes:
        """Bring the trained weights to an engine that stands for a lost one, in no group with those who train."""
        fetched = self._movement.handed(self.handover, work, self._trained_layouts[work.role], rollout)
        rollout.prepare(fetched.parts)
        rollout.switch(work.version, self._cache)
        return fetched.compare(rollout.checksums, self._worker)

    def close(self, timeout: float) -> bool:
        """End the rollout engines. False where one does not end in time."""
        ended = [engine.close(timeout) for engine in self.rollouts.values()]
        for served in self._served.values():
            served.close()
        return all(ended)
