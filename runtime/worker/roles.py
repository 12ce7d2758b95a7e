"""The models of one worker: which engine serves which call, over which copy of a role's weights. Worker side.

Knows engines by their interfaces alone; `engines.py` opens them. Copies follow the plan (`planner/plan/residency.py`):
a call whose layout is that of the trained copy reads it in place; another has a copy of its own, refreshed by
reallocation.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from realgraph.graphs.applied import applied_of
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.spec import Generate, ModelRole, Train
from realgraph.planner.plan.residency import Copy, copies
from realgraph.planner.request.engine_support import TORCH_KIND
from realgraph.runtime.engine import (
    Decode,
    OwnWeights,
    Receiver,
    RolloutEngine,
    RolloutLimits,
    Snapshot,
    TrainEngine,
    TrainSettings,
    Weights,
    WeightSource,
)
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.job.job import Job
from realgraph.runtime.parallel.groups import Collectives
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
    """Engines of this worker by call. Making it is collective: every worker makes its part in the same order."""

    def __init__(self, job: Job, worker: int, collectives: Collectives, decode: Decode) -> None:
        self._job, self._worker, self._collectives = job, worker, collectives
        self._kind = ENGINES[TORCH_KIND]
        layouts = {name: allocation.layout for name, allocation in job.plan.allocations.items()}
        self.trained: dict[str, TrainEngine] = {}  # by role
        self.engines: dict[str, TrainEngine] = {}  # by call, of those that work on packed batches
        self.rollouts: dict[str, RolloutEngine] = {}  # by generate call
        self._in_place: dict[str, TrainEngine] = {}  # generate call -> whose weights its engine reads
        self._averaged: dict[str, list[TrainEngine]] = {}  # trained role -> references that follow it
        self.saved: dict[str, TrainEngine] = {}
        self._changing: list[
            tuple[str, TrainEngine | RolloutEngine]
        ] = []  # copies of the roles that a checkpoint holds
        self._kept: dict[str, Snapshot | None] = {}
        self._begun: dict[str, tuple[int, int]] = {}  # trained role -> version, optimizer steps before its last call
        self._keeping = threading.Lock()
        for copy in copies(job.graph, layouts):
            if worker in copy.layout.mesh.devices:
                self._open(copy, decode)

    def _open(self, copy: Copy, decode: Decode) -> None:
        job, role = self._job, self._job.graph.models[copy.role]
        packed = [name for name in copy.calls if not isinstance(job.graph.calls[name], Generate)]
        averaged = role.ema_rate is not None and role.init is not None
        engine = self._open_train(copy, packed) if packed or averaged else None
        for name in copy.calls:
            if isinstance(job.graph.calls[name], Generate):
                self._open_rollout(name, copy, engine, decode)
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
            self._averaged.setdefault(role.init, []).append(engine)
            self.saved[copy.role] = engine

    def _open_train(self, copy: Copy, packed: Sequence[str]) -> TrainEngine:
        """The engine of the calls `packed` that read or train this copy. Collective."""
        job = self._job
        path = role_path(job.graph.models, copy.role)
        ranks = self._collectives.ranks(copy.layout.mesh)
        return self._kind.open_train(
            job.graph.models[copy.role], path, copy.layout, ranks, self._settings(copy, packed)
        )

    def _open_rollout(self, name: str, copy: Copy, beside: TrainEngine | None, decode: Decode) -> None:
        """The engine of a generate call: over the weights of the engine beside it, where there is one."""
        job = self._job
        limits = RolloutLimits(
            max_running=job.batch.max_running,
            max_cache_tokens=job.plan.allocations[name].kv_cache_tokens,
        )
        weights: WeightSource
        if beside is not None:
            weights, self._in_place[name] = beside.shared_weights(), beside
        else:
            weights = OwnWeights(role_path(job.graph.models, copy.role), self._collectives.member.device)
        self.rollouts[name] = self._kind.open_rollout(job.graph.models[copy.role], weights, limits, decode)

    def _settings(self, copy: Copy, packed: Sequence[str]) -> TrainSettings:
        job = self._job
        tokens = min((job.plan.allocations[name].tokens for name in packed), default=None)
        if not copy.trained:
            return TrainSettings(max_tokens_per_microbatch=tokens)
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
        )

    def load(self, checkpoint: Path) -> None:
        """Take back the states of a checkpoint into every copy of them, as if all had just been reallocated."""
        for name, engine in self._changing:
            engine.load(checkpoint / name)
        for engine in {id(engine): engine for engine in self._in_place.values()}.values():
            self.weights_changed(engine)

    def save(self, folder: Path) -> None:
        """Write every state that training changes. Collective."""
        for name, engine in self.saved.items():
            engine.save(folder / name)

    def keep(self, role: str) -> None:
        """Before `role` is trained: keep its state, and that of references that follow it, for a rescue."""
        with self._keeping:
            self._begun[role] = (self.trained[role].version, self.trained[role].optimizer_steps)
            for name, engine in self.saved.items():
                if engine is self.trained[role] or engine in self._averaged.get(role, ()):
                    self._kept[name] = engine.snapshot()

    def rescue(self, folder: Path, versions: Mapping[str, int]) -> None:
        """Write the states as of `versions` (of the trained roles), from this worker alone; from any thread.

        Raises OSError where this worker holds only a part of a role, or no state of that version.
        """
        for name, engine in self._followers(versions):
            version = versions[self._followed(name)]
            with self._keeping:  # training begins by `keep`: while this holds, live weights do not move under us
                kept = self._kept.get(name)
                found = kept if kept is not None and kept.version == version else engine.snapshot()
            if found is None or found.version != version:
                raise OSError(f"this worker has no whole state of {name!r} at version {version}")
            found.write(folder / name)

    def rescue_together(self, folder: Path, versions: Mapping[str, int]) -> None:
        """Write sharded states as of `versions`, which must be those that stand now. Collective.

        Raises OSError where training has gone on since, or stopped in the middle.
        """
        for role, version in versions.items():
            engine = self.trained[role]
            begun = self._begun.get(role)
            if engine.version != version or (begun and begun[0] == version and begun[1] != engine.optimizer_steps):
                raise OSError(f"the sharded weights of {role!r} have changed since version {version}")
        for name, engine in self._followers(versions):
            engine.save(folder / name)

    def _followed(self, name: str) -> str:
        """The trained role whose training changes `name`: itself, or the one that a reference follows."""
        init = self._job.graph.models[name].init
        return init if name not in self.trained and init else name

    def _followers(self, versions: Mapping[str, int]) -> list[tuple[str, TrainEngine]]:
        """The states of this worker that belong to a checkpoint of these roles. Raises OSError for one not here."""
        for name, model in self._job.graph.models.items():
            if model.ema_rate is not None and model.init in versions and name not in self.saved:
                raise OSError(f"the average {name!r} lies on other workers than {model.init!r}")
        return [(name, engine) for name, engine in self.saved.items() if self._followed(name) in versions]

    def n_parameters(self) -> dict[str, int]:
        """Parameters of every role on this worker (of a shard: of the whole model)."""
        engines: Mapping[str, Receiver] = {**self.engines, **self.rollouts}
        return {
            self._job.graph.role(call): sum(math.prod(spec.shape) for spec in engine.weight_specs())
            for call, engine in engines.items()
        }

    def reads_in_place(self, call: str, engine: TrainEngine) -> bool:
        """The generate call `call` reads the weights of `engine`, as they are at any time."""
        return self._in_place.get(call) is engine

    def weights_changed(self, engine: TrainEngine) -> None:
        """Generators that read the weights of `engine` drop what they cached under the old ones."""
        for name, rollout in self.rollouts.items():
            if self.reads_in_place(name, engine) and rollout.version != engine.version:
                rollout.weights_changed(engine.version)

    def average(self, role: str) -> None:
        """Move the references that follow `role` towards it. Collective."""
        for reference in self._averaged.get(role, ()):
            rate = reference.role.ema_rate
            assert rate is not None
            reference.average_weights(self.trained[role].weights(), rate, self.trained[role].version)

    def reallocate(self, role: str, call: str, version: int, owners: tuple[int, ...]) -> None:
        """Copy the trained weights to this worker's copy for `call`. Owners and receivers all call it.

        Owners gather full tensors (collective where sharded); the first sends each to the receivers that own no part.
        """
        mesh = self._job.plan.allocations[call].layout.mesh
        target = self._receiver(call)
        strangers = [worker for worker in mesh.devices if worker not in owners]
        if self._worker in owners:
            weights = self._send(self.trained[role].weights(), strangers if self._worker == owners[0] else [])
        else:
            assert target is not None, "neither an owner nor a receiver"
            weights = self._receive(target, owners[0])
        if target is None or self._worker not in mesh.devices:
            for _ in weights:
                pass  # only sends
            return
        target.load_weights(weights, version)
        if call in self._in_place:
            self.rollouts[call].weights_changed(version)

    def _receiver(self, call: str) -> Receiver | None:
        """Whose weights `call` reads on this worker, if any."""
        return self._in_place.get(call) or self.engines.get(call) or self.rollouts.get(call)

    @staticmethod
    def _send(weights: Weights, receivers: list[int]) -> Weights:
        for name, tensor in weights:
            whole = tensor.contiguous()
            for receiver in receivers:
                dist.send(whole, receiver)
            yield name, whole

    @staticmethod
    def _receive(engine: Receiver, owner: int) -> Weights:
        for spec in engine.weight_specs():
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=engine.device)
            dist.recv(whole, owner)
            yield spec.name, whole
