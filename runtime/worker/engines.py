"""The engines there are: one table, kind -> what opens its train engine and its rollout engine. Worker side.

The one module of the workers that names a concrete engine.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from realgraph.graphs.spec import Generate, ModelRole
from realgraph.planner.plan.axes import coordinates_of
from realgraph.planner.plan.layout import Layout
from realgraph.planner.request.engine_support import TORCH_KIND
from realgraph.runtime.engine import Decode, RolloutEngine, RolloutLimits, TrainEngine, TrainSettings, WeightSource
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.rollout.opening.engines import EngineOrder, open_sglang
from realgraph.runtime.train.offload import open_train


@dataclass(frozen=True)
class EngineKind:
    """The way the engines of one kind are opened. Opening a train engine is collective over its workers.

    open_rollout: what it gets before the ranks of its call's layout is called by the engine, from any thread, whenever
    there is something to take. Collective over ranks that generate together.
    """

    open_train: Callable[[ModelRole, str, Layout, LayoutRanks, TrainSettings], TrainEngine]
    open_rollout: Callable[
        [ModelRole, WeightSource, RolloutLimits, Decode, Callable[[], None], LayoutRanks], RolloutEngine
    ]


ENGINES: Mapping[str, EngineKind] = {TORCH_KIND: EngineKind(open_train, open_rollout)}  # the kinds of `SUPPORT`


class Replica(NamedTuple):
    """A data-parallel replica of a generate call, as the worker that heads it opens its engine."""

    call: str
    path: str  # of its first weights
    worker: int
    device: torch.device


def open_server(job: Job, replica: Replica, decode: Decode, notify: Callable[[], None]) -> RolloutEngine:
    """The engine of a replica whose weights are a server's. Its log and its weights are in the run's folder; on a host
    that does not see that, in a temporary one."""
    allocation, call = job.plan.allocations[replica.call], job.graph.calls[replica.call]
    assert isinstance(call, Generate)
    folder = Path(job.run_dir)
    order = EngineOrder(
        role=job.graph.models[call.model],
        path=replica.path,
        rollout=job.rollout,
        limits=RolloutLimits(max_running=job.max_running(replica.call)),
        decode=decode,
        device=replica.device,
        folder=RunFolder(folder).logs if folder.is_dir() else Path(tempfile.mkdtemp(prefix="realgraph-")),
        call=replica.call,
        replica=coordinates_of(allocation.layout, replica.worker).dp,
        worker=replica.worker,
        tp=allocation.layout.tp,
        ep=allocation.layout.ep,
        context=job.data.max_prompt_tokens + call.most_new_tokens(job.batch.max_new_tokens),
        start_seconds=job.runtime.start_seconds,
        silent_seconds=job.runtime.min_deadline_seconds,
        deadline_seconds=job.runtime.deadline(allocation.seconds),
    )
    return open_sglang(order, notify)
