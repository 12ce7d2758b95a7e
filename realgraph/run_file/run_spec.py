"""The run file: what a user edits. One namespace with the graph file for params, models, calls and inputs."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.spec import FORMAT, ModelCall, ModelRole
from realgraph.planner.costs.memory.margin import MemorySpec
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.runtime.job.job import BatchSpec, CheckpointSpec, DataSpec, EvalSpec, OutputSpec, RuntimeSpec
from realgraph.runtime.job.launch import LaunchSpec, LocalLaunch
from realgraph.runtime.job.rollout import RolloutSpec

Count = Annotated[int, Meta(ge=1)]


class RunSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A run: a graph, what it changes of it, its data, its machine and its length.

    As a file, `params`, `models`, `calls` and `inputs` say only what differs from the graph; here they are whole.
    """

    graph: str  # a name of `realgraph graphs`, or a graph file relative to the run file
    data: DataSpec  # the data set
    name: str | None = None  # of the run; default: the graph's
    params: dict[str, Any] = field(default_factory=dict)  # values for parameters that the graph declares
    models: dict[str, ModelRole] = field(default_factory=dict)  # role -> path and settings
    calls: dict[str, ModelCall] = field(default_factory=dict)  # call -> fields that differ, or a call of one's own
    inputs: dict[str, str] = field(default_factory=dict)  # input -> its type, such as `group text`
    batch: BatchSpec = field(default_factory=BatchSpec)  # the size of a step
    rollout: RolloutSpec = field(default_factory=RolloutSpec)  # the engines that generate
    cluster: ClusterSpec = field(default_factory=ClusterSpec)  # the machine
    allocation: dict[str, Pin] = field(default_factory=dict)  # call -> what the planner must keep to
    constraints: Constraints = field(default_factory=Constraints)  # on the plan as a whole
    memory: MemorySpec = field(default_factory=MemorySpec)  # how sure a plan is to fit
    staleness: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # steps a sample may lag behind the weights; 0: synchronous
    overdue: Literal["mask", "wait", "drop", "allow"] = "mask"  # samples older than `staleness`
    steps: Count = 100  # of training (or of generation, where nothing trains)
    seed: Annotated[int, Meta(ge=0)] = 0  # of data order and sampling
    eval: EvalSpec | None = None  # held-out evaluation
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)  # when to save
    outputs: OutputSpec = field(default_factory=OutputSpec)  # what to write
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)  # deadlines and processes
    launch: LaunchSpec = field(default_factory=LocalLaunch)  # where the workers are started
    format: int = FORMAT  # version of this file's format
