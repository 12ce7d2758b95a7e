"""The models of one worker: which engine serves which call, over which copy of a role's weights. Worker side.

The one place that chooses engines. Copies follow the plan (`planner/plan/residency.py`): a call whose layout is that of
the trained copy reads it in place; another has a copy of its own, refreshed by reallocation.
"""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.graphs.applied import applied_of
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.spec import Generate, ModelRole, Train
from realgraph.planner.plan.residency import Copy, copies
from realgraph.runtime.engine import Decode, RolloutEngine, RolloutLimits, TrainSettings
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.job.job import Job
from realgraph.runtime.parallel.groups import Collectives
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.files import Snapshot

MAX_LOGPROB_GAP = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # mean nats a sampled token


def role_path(models: Mapping[str, ModelRole], role: str) -> str:
    """Where a role's first weights come from: its own path, or that of the role it starts as. Raises ConfigError."""
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
        layouts = {name: allocation.layout for name, allocation in job.plan.allocations.items()}
        self.trained: dict[str, TorchTrainEngine] = {}
        self.engines: dict[str, TorchTrainEngine] = {}
        self.rollouts: dict[str, RolloutEngine] = {}
        self._averaged: dict[str, list[TorchTrainEngine]] = {}  # trained role -> references that follow it
        self.saved: dict[str, TorchTrainEngine] = {}
        self._changing: list[tuple[str, TorchTrainEngine]] = []  # every copy of the roles that a checkpoint holds
        self._kept: dict[str, Snapshot | None] = {}
        self._begun: dict[str, tuple[int, int]] = {}  # trained role -> version, optimizer steps before its last call
        self._keeping = threading.Lock()
        for copy in copies(job.graph, layouts):
            if worker in copy.layout.mesh.devices:
                self._open(copy, decode)

    def _open(self, copy: Copy, decode: Decode) -> None:
        job, role = self._job, self._job.graph.models[copy.role]
        packed = [name for name in copy.calls if not isinstance(job.graph.calls[name], Generate)]
        tokens = min((job.plan.allocations[name].max_tokens_per_microbatch for name in packed), default=None)
        settings = self._settings(copy, tokens) if copy.trained else TrainSettings(max_tokens_per_microbatch=tokens)
        path = role_path(job.graph.models, copy.role)
        engine = open_engine(role, path, copy.layout, self._collectives.ranks(copy.layout.mesh), settings)
        for name in copy.calls:
            self.engines[name] = engine
            if isinstance(job.graph.calls[name], Generate):
                limits = RolloutLimits(
                    max_running=job.batch.max_running,
                    max_cache_tokens=job.plan.allocations[name].max_tokens_per_microbatch,
                )
                self.rollouts[name] = TorchRolloutEngine(engine.model.network, limits, decode=decode)
        averaged = role.ema_rate is not None and role.init is not None
        if averaged or any(isinstance(call, Train) and call.model == copy.role for call in job.graph.calls.values()):
            self._changing.append((copy.role, engine))
        if copy.trained:
            self.trained[copy.role] = self.saved[copy.role] = engine
        elif role.ema_rate is not None and role.init is not None:
            self._averaged.setdefault(role.init, []).append(engine)
            self.saved[copy.role] = engine

    def _settings(self, copy: Copy, tokens: int | None) -> TrainSettings:
        job = self._job
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

    def _followers(self, versions: Mapping[str, int]) -> list[tuple[str, TorchTrainEngine]]:
        """The states of this worker that belong to a checkpoint of these roles. Raises OSError for one not here."""
        for name, model in self._job.graph.models.items():
            if model.ema_rate is not None and model.init in versions and name not in self.saved:
                raise OSError(f"the average {name!r} lies on other workers than {model.init!r}")
        return [(name, engine) for name, engine in self.saved.items() if self._followed(name) in versions]

    def n_parameters(self) -> dict[str, int]:
        """Parameters of every role on this worker (of a shard: of the whole model)."""
        counts = {}
        for call, engine in self.engines.items():
            role = self._job.graph.role(call)
            counts[role] = sum(parameter.numel() for parameter in engine.model.network.parameters())
        return counts

    def weights_changed(self, engine: TorchTrainEngine) -> None:
        """Generators that read the weights of `engine` drop what they cached under the old ones."""
        for name, rollout in self.rollouts.items():
            if self.engines[name] is engine and rollout.version != engine.version:
                rollout.update(None, engine.version)

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
        strangers = [worker for worker in mesh.devices if worker not in owners]
        if self._worker in owners:
            weights = self._send(self.trained[role].weights(), strangers if self._worker == owners[0] else [])
        else:
            weights = self._receive(self.engines[call], owners[0])
        target = self.engines.get(call)
        if target is None or self._worker not in mesh.devices:
            for _ in weights:
                pass  # only sends
            return
        target.load_weights(weights, version)
        if call in self.rollouts:
            self.rollouts[call].update(None, version)

    @staticmethod
    def _send(weights: Iterator[tuple[str, Tensor]], receivers: list[int]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            whole = tensor.contiguous()
            for receiver in receivers:
                dist.send(whole, receiver)
            yield name, whole

    @staticmethod
    def _receive(engine: TorchTrainEngine, owner: int) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in engine.model.network.named_parameters():
            whole = torch.empty(parameter.shape, dtype=engine.dtype, device=engine.ranks.device)
            dist.recv(whole, owner)
            yield name, whole
