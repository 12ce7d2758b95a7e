"""A configuration whose training was measured, as the request for a plan of one train call and the allocation that ran.

`realgraph plan` prices an allocation of a given plan by the same functions. What a request can't express stands beside
its figure here: adapters, experts dealt in their order, experts that all get as many tokens.
"""

from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published import Row
from benchmarks.published_adapters import adapted_train_seconds
from benchmarks.published_routing import dealt_train_seconds
from benchmarks.published_steps import ROOM_BYTES, SYSTEM
from realgraph.graphs.graph import Graph
from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.engine_overheads import NO_OVERHEADS
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import setting_of, train_work
from realgraph.planner.options.holdings import allocation_of, candidate_of, with_stages
from realgraph.planner.plan.layout import Layout, Recompute
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Allocation, Plan, Turn
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.assembly import repriced
from realgraph.run_file.open_graph import open_graph

TRAIN = "train"  # the only call of the graph
BALANCED = 1.0  # tokens of the busiest expert's device over the mean: routers of measurements are made to balance


class Case(Struct, frozen=True):
    """A configuration that was measured: what is asked of the planner, and what is added to its answer."""

    request: PlanRequest
    option: CallOption  # the allocation that ran
    rows: dict[str, Row]  # its measurements by metric
    whole: float = 0.0  # share of layers that are computed again whole, the others as `option` says
    lora_rank: int = 0  # of trained adapters, 0 where all weights are trained
    dealt: bool = False  # the router deals experts in their order

    @property
    def model(self) -> ModelSpec:
        return self.request.model(TRAIN)

    @property
    def layout(self) -> Layout:
        return self.option.layout

    @property
    def engine(self) -> Backend:
        backend = self.request.engine.backend
        assert backend is not None, "every published system names its engine"
        return backend

    def seconds(self, recompute: Recompute) -> float:
        """Seconds of one optimizer step's arithmetic and traffic."""
        option = replace(self.option, recompute=recompute)
        planned = priced(self.request, option).seconds
        return planned if not self.model.experts and not self.lora_rank else planned + self._beside(option)

    def _beside(self, option: CallOption) -> float:
        """Seconds by which the routers and adapters of measurements differ from those that a request stands for."""
        request = self.request
        setting = setting_of(request, TRAIN, option.layout, request.cluster, request.costs.factors)
        work = train_work(request, TRAIN, option)
        return self._own_seconds(setting, replace(work, imbalance=BALANCED)) - train_seconds(setting, work)

    def _own_seconds(self, setting: Setting, work: TrainWork) -> float:
        if self.lora_rank:
            return adapted_train_seconds(setting, work, self.lora_rank)
        return dealt_train_seconds(setting, work) if self.dealt else train_seconds(setting, work)


def priced(request: PlanRequest, option: CallOption) -> Allocation:
    """An allocation with its predictions, as `realgraph plan` prices a plan that it is given; on devices with room for
    all of it, since it has run."""
    roomy = replace(request, cluster=replace(request.cluster, memory_bytes=ROOM_BYTES))
    orders = {device: (Turn(TRAIN),) for device in option.layout.mesh.devices}
    plan = Plan({TRAIN: allocation_of(option)}, orders, hashes(roomy))
    return repriced(roomy, plan).allocations[TRAIN]


def staged(request: PlanRequest, option: CallOption) -> CallOption:
    """The option with the layers of its stages, as a plan has them."""
    allocations = with_stages(request, {TRAIN: allocation_of(option)})
    return candidate_of(request, allocations, TRAIN)


def train_request(
    model: ModelSpec, machine: tuple[Cluster, EfficiencyFactors], engine: Backend, batch: tuple[int, int]
) -> PlanRequest:
    """One optimizer step on a cluster, by an engine without overheads besides. batch: samples, and tokens of each."""
    cluster, factors = machine
    samples, length = batch
    graph = _graph()
    return PlanRequest(
        graph=graph,
        workload=Workload(samples, 1, prompt_tokens=0, max_new_tokens=length, mean_new_tokens=float(length)),
        cluster=cluster,
        models=dict.fromkeys(graph.models, model),
        engine=replace(SYSTEM, backend=engine),
        costs=CostTable(factors=factors, overheads=NO_OVERHEADS),
    )


@cache
def _graph() -> Graph:
    return open_graph("sft", ("models.actor.dtype=bfloat16",))
