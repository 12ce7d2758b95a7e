"""The work of a call in one step, and its seconds by the formulas: lengths, batches, sequences that run at once."""

import math
from functools import lru_cache

from msgspec.structs import replace

from realgraph.graphs.graph import INPUT, Key
from realgraph.graphs.keys import DType
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, Train
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.move import transfer_seconds
from realgraph.planner.costs.compute.train import TrainWork, microbatches, train_seconds
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds
from realgraph.planner.costs.lengths import lengths_of
from realgraph.planner.costs.memory.terms import CACHE_PAGE_TOKENS
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.option import CallOption
from realgraph.planner.request.cost_table import Phase
from realgraph.planner.request.request import PlanRequest

FUNCTION_SECONDS = 1e-4  # of one sample, in one of the workers' subprocesses
ADVANTAGE_SECONDS = 1e-5  # of one sample
RAGGED = ("tokens", "text", "json")  # one value of which is a whole sample, here counted in tokens
# Bytes of a number as the data plane carries it; of text and JSON those of a token's characters. Those of `experts`
# depend on the model.
VALUE_BYTES: dict[DType, int] = {
    "bool": 1,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "float64": 8,
    "tokens": 8,
    "text": 4,
    "json": 4,
}


def sample_tokens(request: PlanRequest) -> int:
    """The longest sample: prompt and response, tokens."""
    return request.workload.prompt_tokens + request.workload.max_new_tokens


def longest_part(request: PlanRequest, layout: Layout) -> int:
    """Tokens of the longest sample on each of the cp ranks that share it."""
    return math.ceil(sample_tokens(request) / layout.cp)


def mean_tokens(request: PlanRequest) -> float:
    """The expected sample: prompt and response, tokens."""
    return request.workload.expected_prompt_tokens + request.workload.mean_new_tokens


# --- seconds ----------------------------------------------------------------------------------------------------------


def is_trained(request: PlanRequest, role: str) -> bool:
    """True where some call of the graph trains the role."""
    return any(isinstance(call, Train) and call.model == role for call in request.graph.calls.values())


def drops_copy(request: PlanRequest, call: str) -> bool:
    """True where a call's own copy of trained weights is given up after each use, and brought again before the next.

    A stream of generation uses its copy all the time.
    """
    streams = request.workload.staleness > 0 and isinstance(request.graph.calls[call], Generate)
    return request.engine.drops_copies and not streams


def stays_on_devices(request: PlanRequest, call: str) -> str:
    """Reason why a generate call's weights can't wait in the host's memory between two sessions, '' where they can; ''
    of other calls."""
    role = request.role(call)
    if not isinstance(request.graph.calls[call], Generate):
        return ""
    if is_trained(request, request.graph.role(call)):
        return "generate calls of a trained role get its weights by reallocation: none wait for them elsewhere"
    if role.ema_rate is not None and role.init is not None:
        return f"weights of generate calls that follow the training of {role.init!r} stay on the devices"
    return "" if request.workload.staleness == 0 else "generate calls run all the time where samples may be stale"


def setting_of(
    request: PlanRequest, call: str, layout: Layout, cluster: Cluster, factors: EfficiencyFactors | None = None
) -> Setting:
    """A call under a layout, as the engines of a run do it. factors: measured ones, in the place of the shipped."""
    cuts = request.engine.cuts_served_experts
    return Setting(request.model(call), request.role(call), layout, cluster, factors, cuts_served_experts=cuts)


def setting_seconds(request: PlanRequest, call: str, setting: Setting, candidate: CallOption) -> float:
    """Predicted seconds of one mesh-holding call, its inputs' way to its devices included: see `formula_seconds`."""
    inputs = input_seconds(request, call, setting.layout, setting.cluster)
    return inputs + formula_seconds(request, call, setting, candidate)


def formula_seconds(request: PlanRequest, call: str, setting: Setting, candidate: CallOption) -> float:
    """Predicted seconds of what a call computes, by the formulas alone.

    A role's own gradient checkpointing counts besides the candidate's recomputation.
    """
    match request.graph.calls[call]:
        case Train() as train:
            return train_seconds(setting, train_work(request, train, candidate))
        case Inference():
            return inference_seconds(setting, _packed_work(request, candidate))
        case Generate():
            return generate_seconds(setting, generate_work(request, candidate))
        case Function() | Advantage():
            raise AssertionError(f"{call} holds no mesh")


def input_seconds(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> float:
    """Seconds to bring what a call reads to its devices, before it starts: each data-parallel rank gets its samples.

    0 where nothing that it reads was made by another call, or one device makes everything. Where the cluster has
    several nodes, samples come from others: they are dealt anew at each call.
    """
    nbytes = input_bytes(request, call)
    if not nbytes or request.cluster.n_devices == 1:
        return 0.0
    return transfer_seconds(cluster, nbytes / layout.dp, far=request.cluster.nodes > 1 or bool(request.cluster.more))


def input_bytes(request: PlanRequest, call: str) -> float:
    """Bytes of all samples of a step that a call reads and other calls write; each worker reads the data set itself."""
    keys = (request.graph.keys[name] for name in request.graph.reads.get(call, ()))
    return sum(_key_bytes(request, key) for key in keys if key.producer != INPUT)


def _key_bytes(request: PlanRequest, one: Key) -> float:
    """Bytes of a key in a step: an entry a step, group, sample or token; a ragged entry has as many tokens as its
    sample."""
    key = one.type
    samples = request.workload.n_samples
    entries = {
        "step": 1.0,
        "group": request.workload.groups,
        "sample": samples,
        "token": samples * mean_tokens(request),
    }
    ragged = mean_tokens(request) if key.level == "sample" else request.workload.expected_prompt_tokens
    value = request.model(one.producer).route_bytes() if key.dtype == "experts" else VALUE_BYTES[key.dtype]
    return entries[key.level] * value * (ragged if key.dtype in RAGGED else 1.0)


def generate_work(request: PlanRequest, candidate: CallOption) -> GenerateWork:
    """The work of a generate call."""
    workload = request.workload
    return GenerateWork(
        samples=workload.n_samples,
        samples_per_group=workload.samples_per_group,
        prompt_tokens=workload.expected_prompt_tokens,
        mean_new_tokens=workload.mean_new_tokens,
        max_new_tokens=workload.max_new_tokens,
        running=running_sequences(request, candidate.layout, candidate.tokens),
        lengths=workload.lengths,
    )


def train_work(request: PlanRequest, call: Train, candidate: CallOption) -> TrainWork:
    """The work of a train call."""
    return replace(
        _packed_work(request, candidate),
        optimizer_steps=call.minibatches,
        epochs=call.epochs,
        recompute=candidate.recompute,
        schedule=candidate.schedule,
        chunks=candidate.chunks,
    )


def microbatches_of(request: PlanRequest, call: str, candidate: CallOption, cluster: Cluster) -> int:
    """Micro-batches of one optimizer step on one data-parallel rank; a generate call has none."""
    kind = request.graph.calls[call]
    if isinstance(kind, Generate):
        return 0
    setting = setting_of(request, call, candidate.layout, cluster)
    if isinstance(kind, Train):
        return microbatches(setting, train_work(request, kind, candidate))
    return microbatches(setting, _packed_work(request, candidate))


def _packed_work(request: PlanRequest, candidate: CallOption) -> TrainWork:
    mean = mean_tokens(request)
    return TrainWork(
        tokens=math.ceil(request.workload.n_samples * mean),
        sample_tokens=mean,
        microbatch_tokens=candidate.tokens,
        prompt_tokens=request.workload.expected_prompt_tokens,
        samples_per_group=request.workload.samples_per_group,
        longest_tokens=longest_expected(request.workload),
    )


@lru_cache(maxsize=256)
def longest_expected(workload: Workload) -> int:
    """Tokens of the longest sample that a batch is expected to have."""
    lengths = lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths)
    return math.ceil(workload.expected_prompt_tokens + lengths.expected_max(workload.n_samples))


def running_sequences(request: PlanRequest, layout: Layout, kv_tokens: int) -> int:
    """Number of sequences that decode at once on a replica with a paged cache of `kv_tokens`."""
    share = sequences_in_flight(request, layout.dp)
    return max(1, min(share, most_running(request), int(kv_tokens / tokens_in_flight(request) + 1e-9)))


def sequences_in_flight(request: PlanRequest, replicas: int) -> int:
    """The most that the staleness bound lets be in flight on one of so many replicas: 1 + staleness batches in all."""
    return math.ceil(request.workload.n_samples / replicas) * (1 + request.workload.staleness)


def most_running(request: PlanRequest) -> int:
    """Sequences that may decode at once on one replica."""
    return request.workload.max_running or request.engine.max_running


def tokens_in_flight(request: PlanRequest) -> float:
    """Cache tokens that one of many running sequences takes: its prompt and the age of a running sequence, with room,
    and half a page, as its last one is not full.

    1.15 covers the fluctuation of the sum over many sequences of all ages.
    """
    workload = request.workload
    lengths = lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths)
    return workload.expected_prompt_tokens + 1.15 * lengths.mean_age + CACHE_PAGE_TOKENS / 2


def free_seconds(request: PlanRequest) -> dict[str, float]:
    """Predicted seconds of the calls that hold no mesh: functions and advantages."""
    samples = request.workload.n_samples
    measured = request.costs.factors.function_seconds if request.costs.factors else None
    function_seconds = FUNCTION_SECONDS if measured is None else measured
    seconds: dict[str, float] = {}
    for name, call in request.graph.calls.items():
        if isinstance(call, Function):
            seconds[name] = function_seconds * math.ceil(samples / request.cluster.n_devices)
        elif isinstance(call, Advantage):
            seconds[name] = ADVANTAGE_SECONDS * samples
    return seconds


def phase_of(call: ModelCall) -> Phase:
    """The phase whose measured factor applies."""
    match call:
        case Train():
            return "train"
        case Inference():
            return "inference"
        case Generate():
            return "generate"
        case Function() | Advantage():
            raise AssertionError("free calls have no phase")
