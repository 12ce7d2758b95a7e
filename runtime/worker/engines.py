"""The engines there are: one table, kind -> what opens its train engine and its rollout engine. Worker side.

The one module of the workers that names a concrete engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import Layout
from realgraph.planner.request.engine_support import TORCH_KIND
from realgraph.runtime.engine import Decode, RolloutEngine, RolloutLimits, TrainEngine, TrainSettings, WeightSource
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.parallel.groups import LayoutRanks
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
