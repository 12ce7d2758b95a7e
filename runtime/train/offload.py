"""A train engine whose weights and optimizer states wait in host memory between its calls. Worker side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from realgraph.graphs.spec import ModelRole, Train
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import Parts, SharedWeights, TrainEngine, TrainOptions, TrainSettings, Weights, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.models.host_states import HostStates
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.segments import WeightSegment
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.files import HostSnapshot
from realgraph.runtime.wire.metrics import Metric, ResidentBytes


def open_train(role: ModelRole, path: str, layout: Layout, ranks: LayoutRanks, settings: TrainSettings) -> TrainEngine:
    """The train engine of a copy, offloaded where its settings say so. Collective over `ranks`; raises ConfigError."""
    engine = open_engine(role, path, layout, ranks, settings)
    return OffloadedEngine(engine) if settings.offloaded else engine


class OffloadedEngine:
    """TrainEngine round another one of this process, whose states are on the device only while something uses them."""

    def __init__(self, engine: TorchTrainEngine) -> None:
        self._engine = engine
        self._states = HostStates(engine.state_tensors)

    # --- facts, which need no states ----------------------------------------------------------------------------------

    @property
    def role(self) -> ModelRole:
        """Its role."""
        return self._engine.role

    @property
    def version(self) -> int:
        """Completed train calls."""
        return self._engine.version

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that were taken."""
        return self._engine.optimizer_steps

    @property
    def gate_passed(self) -> bool:
        """See TrainEngine."""
        return self._engine.gate_passed

    @gate_passed.setter
    def gate_passed(self, passed: bool) -> None:
        self._engine.gate_passed = passed

    @property
    def step(self) -> int:
        """See TrainEngine."""
        return self._engine.step

    @property
    def source(self) -> Path | None:
        """See TrainEngine."""
        return self._engine.source

    @property
    def max_positions(self) -> int:
        """See TrainEngine."""
        return self._engine.max_positions

    @property
    def device(self) -> torch.device:
        """The device that the states are brought to."""
        return self._engine.device

    @property
    def segment(self) -> WeightSegment | None:
        """None: what comes and goes can't be read by others."""
        return None

    def prefetched(self) -> AbstractContextManager[int]:
        """See TrainEngine."""
        return self._states.prefetched()

    def resident_bytes(self) -> ResidentBytes:
        """See TrainEngine."""
        return self._engine.resident_bytes()

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See TrainEngine."""
        return self._engine.weight_specs()

    def shared_weights(self) -> SharedWeights:
        """Raises ValueError: what comes and goes can't be read in place."""
        raise ValueError("offloaded weights can't be read in place")

    # --- what needs them ----------------------------------------------------------------------------------------------

    def inference(self, batch: Packed, output: Literal["logprobs", "values", "scores"], temperature: float) -> Tensor:
        """See TrainEngine."""
        with self._states.used(changed=False):
            return self._engine.inference(batch, output, temperature)

    def train(self, call: Train, minibatches: Sequence[Packed], how: TrainOptions | None = None) -> dict[str, Metric]:
        """See TrainEngine."""
        with self._states.used(changed=True):
            return self._engine.train(call, minibatches, how)

    def evaluate(self, call: Train, batch: Packed) -> dict[str, Metric]:
        """See TrainEngine."""
        with self._states.used(changed=False):
            return self._engine.evaluate(call, batch)

    def weights(self) -> Weights:
        """See TrainEngine."""
        with self._states.used(changed=False):
            yield from self._engine.weights()

    @contextmanager
    def local_parts(self) -> Iterator[Mapping[str, WeightPart]]:
        """See TrainEngine."""
        with self._states.used(changed=False), self._engine.local_parts() as parts:
            yield parts

    def load_weights(self, parts: Parts, version: int) -> None:
        """See TrainEngine."""
        with self._states.used(changed=True):
            self._engine.load_weights(parts, version)

    def release(self) -> None:
        """See TrainEngine. Its weights have left the device already."""

    def average_weights(self, parts: Parts, rate: float, version: int) -> None:
        """See TrainEngine."""
        with self._states.used(changed=True):
            self._engine.average_weights(parts, rate, version)

    def snapshot(self) -> HostSnapshot:
        """See TrainEngine."""
        with self._states.used(changed=False):
            return self._engine.snapshot()

    def save(self, folder: RunPath) -> None:
        """See TrainEngine."""
        with self._states.used(changed=False):
            self._engine.save(folder)

    def load(self, folder: RunPath) -> None:
        """See TrainEngine."""
        with self._states.used(changed=True):
            self._engine.load(folder)
