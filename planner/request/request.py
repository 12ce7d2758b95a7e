"""All that a plan depends on, in one value, and the hashes that tie a plan to it. Searches nothing."""

import hashlib

import msgspec
from msgspec import Struct, field

from realgraph.graphs.graph import Edge, Graph
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, ModelRole, Train
from realgraph.planner.costs.engine_overheads import EngineOverheads, beside_factors
from realgraph.planner.costs.memory.margin import MemorySpec
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.plan.plan import Hashes, Plan
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.engine_support import TORCH, EngineSupport
from realgraph.planner.request.pins import Pin


class PlanRequest(Struct, frozen=True):
    """A request for a plan: the graph on the cluster."""

    graph: Graph
    workload: Workload
    cluster: Cluster
    models: dict[str, ModelSpec]  # of every role of the graph
    pins: dict[str, Pin] = field(default_factory=dict)  # of some of its calls
    engine: EngineSupport = TORCH  # what the engines can run that the plan is for
    costs: CostTable = CostTable()  # measured
    constraints: Constraints = Constraints()
    memory: MemorySpec = MemorySpec()

    @property
    def mesh_calls(self) -> tuple[str, ...]:
        """The calls that hold a mesh, in topological order; the others (functions, advantages) are free."""
        return self.graph.mesh_calls

    def model(self, call: str) -> ModelSpec:
        """The model that a mesh-holding call runs."""
        return self.models[self.graph.role(call)]

    def role(self, call: str) -> ModelRole:
        """The role that a mesh-holding call runs."""
        return self.graph.models[self.graph.role(call)]

    def overheads(self, cluster: Cluster) -> EngineOverheads:
        """The overheads of the engines on a group of nodes: beside factors measured with them, such as a CPU's,
        what none of those holds."""
        known = self._known_overheads(cluster)
        step = self.costs.step_end_seconds
        return known if step is None else msgspec.structs.replace(known, step_seconds=step)

    def _known_overheads(self, cluster: Cluster) -> EngineOverheads:
        if self.costs.overheads is not None:
            return self.costs.overheads
        if cluster.is_cpu:
            return EngineOverheads(step_seconds=self.engine.overheads.step_seconds)
        measured = self.costs.factors is not None and self.costs.kind in ("", cluster.kind)
        return beside_factors(self.engine.overheads) if measured else self.engine.overheads


def kept_by(request: PlanRequest, plan: Plan) -> PlanRequest:
    """The request at the staleness that the plan keeps to."""
    return at_staleness(request, plan.staleness)


def at_staleness(request: PlanRequest, staleness: int) -> PlanRequest:
    """The request with another bound on the steps that samples may lag behind the weights."""
    return msgspec.structs.replace(request, workload=msgspec.structs.replace(request.workload, staleness=staleness))


def hashes(request: PlanRequest) -> Hashes:
    """Hashes of what decides if a plan can run: learning rates, losses, temperatures and expected lengths may change.

    The staleness bound is not among it: a plan runs under every bound that is no less than what it keeps to.
    """
    graph = request.graph
    shape = {
        "calls": {name: _shape(call) for name, call in graph.calls.items()},
        "edges": sorted((e.producer, e.consumer, e.role, _distance(graph, e)) for e in graph.edges),
        "models": {name: (request.models[name], *_states(role)) for name, role in graph.models.items()},
    }
    kinds = sorted({group.kind for group in request.cluster.groups})
    cluster = (request.cluster, [device_kind(kind).costs for kind in kinds])
    sizes = at_staleness(request, 0).workload
    workload = msgspec.structs.replace(sizes, mean_new_tokens=0.0, mean_prompt_tokens=None, lengths=())
    costs = "" if request.costs == CostTable() else _digest(request.costs)
    return Hashes(_digest(shape), _digest(workload), _digest(cluster), costs)


def _distance(graph: Graph, edge: Edge) -> int:
    """The distance of an edge, in steps; that of new weights to a call that generates depends on the staleness."""
    return 1 if edge.role and isinstance(graph.calls.get(edge.consumer), Generate) else edge.distance


def call_hashes(request: PlanRequest, call: str) -> tuple[str, str]:
    """Hashes of a call with its role and model, and of the workload: what ties a measured call to a request."""
    shape = (request.model(call), *_states(request.role(call)), _shape(request.graph.calls[call]))
    return _digest(shape), _digest((hashes(request).workload, request.workload.staleness))


def _states(role: ModelRole) -> tuple[str | bool | None, ...]:
    """The settings that memory depends on."""
    kept = (role.trainable, role.gradient_checkpointing, role.ema_rate is not None)
    return (role.head, role.dtype, role.master_dtype, *kept)


def _shape(call: ModelCall) -> tuple[str | int | None, ...]:
    match call:
        case Generate():
            written = () if call.max_prompt_tokens is None else (call.max_prompt_tokens,)
            return ("generate", call.model, call.n, call.max_new_tokens, *written)
        case Inference():
            return ("inference", call.model, call.output)
        case Train():
            return ("train", call.model, call.minibatches, call.epochs)
        case Function():
            return ("function", call.over)
        case Advantage():
            return ("advantage",)


def _digest(value: object) -> str:
    """SHA-256 of the JSON form with sorted keys: its first 16 hex digits."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
