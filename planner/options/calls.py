"""The work of a call in one step, and its seconds by the formulas: lengths, batches, sequences that run at once."""

import math
from functools import lru_cache

from msgspec.structs import replace

from realgraph.graphs.graph import INPUT, Key
from realgraph.graphs.keys import TOKENS, DType
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, Train
from realgraph.planner.costs.backend import backend_of
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.move import transfer_seconds
from realgraph.planner.costs.compute.train import TrainWork, microbatches, train_seconds
from realgraph.planner.costs.engine_overheads import EngineOverheads, with_overheads
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds
from realgraph.planner.costs.lengths import lengths_of
from realgraph.planner.costs.memory.terms import CACHE_PAGE_TOKENS, CACHE_SPARE_TOKENS
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
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


def longest_part(request: PlanRequest, call: str, layout: Layout) -> int:
    """Tokens of the longest sample of a call on each of the cp ranks that share it."""
    return math.ceil(sample_tokens(sized(request, call)) / layout.cp)


def mean_tokens(request: PlanRequest) -> float:
    """The expected sample: prompt and response, tokens."""
    return request.workload.expected_prompt_tokens + request.workload.mean_new_tokens


# --- seconds ----------------------------------------------------------------------------------------------------------


def is_trained(request: PlanRequest, role: str) -> bool:
    """True where some call of the graph trains the role."""
    return any(isinstance(call, Train) and call.model == role for call in request.graph.calls.values())


def drops_copy(request: PlanRequest, call: str) -> bool:
    """True where a call's own copy of trained weights is given up after each use, and brought again before the next.

    Generation that goes on beside other calls uses its copy all the time.
    """
    beside = request.workload.staleness > 0 or len(request.graph.generates) > 1
    return request.engine.drops_copies and not (beside and isinstance(request.graph.calls[call], Generate))


def streams(request: PlanRequest, call: str) -> bool:
    """True of a generate call whose samples may be of older weights, so that it runs on while these are trained. Later
    generate calls of a group are priced as calls that run once a step."""
    return request.workload.staleness > 0 and call in request.graph.generates[:1]


def stages_weights(request: PlanRequest, call: str, cluster: Cluster) -> bool:
    """True of a generate call on CPUs that goes on while its role is trained: new weights come to memory beside those
    in use. Servers have theirs to themselves."""
    stream = request.workload.staleness > 0 and isinstance(request.graph.calls[call], Generate)
    return (
        stream and cluster.is_cpu and not request.engine.own_devices and is_trained(request, request.graph.role(call))
    )


def stays_beside(request: PlanRequest, call: str) -> bool:
    """True of a later generate call: its caches lie beside those of the others while all of them generate."""
    return call in request.graph.generates[1:]


def sized(request: PlanRequest, call: str) -> PlanRequest:
    """The request with the numbers and lengths of the samples that a call makes or works on, where several generate, or
    it works on sequences of the data beside samples: one a group, taken to be as long as the samples.

    A written prompt is taken to hold a whole sample. Later responses are in proportion to the longest that they may be.
    """
    graph, workload = request.graph, request.workload
    if graph.works_on_data(call):
        return replace(request, workload=replace(workload, samples_per_group=1))
    if len(graph.generates) < 2:
        return request
    name = call if isinstance(graph.calls[call], Generate) else graph.sampler(call)
    generate, leading = graph.calls[name], graph.calls[graph.generates[0]]
    assert isinstance(generate, Generate) and isinstance(leading, Generate)
    most = generate.most_new_tokens(workload.max_new_tokens)
    if generate is leading:
        return replace(request, workload=replace(workload, max_new_tokens=most))
    prompt, mean, groups, each = workload.prompt_tokens, workload.expected_prompt_tokens, workload.groups, generate.n
    if graph.keys[generate.reads[0]].producer != INPUT:
        prompt = generate.max_prompt_tokens or prompt + workload.max_new_tokens
        mean = min(float(prompt), mean + workload.mean_new_tokens)
        of_samples = graph.keys[f"{name}.{TOKENS}"].type.level == "sample"
        groups, each = (workload.n_samples if of_samples else groups), 1
    share = most / leading.most_new_tokens(workload.max_new_tokens)
    own = replace(
        workload,
        groups=groups,
        samples_per_group=each,
        prompt_tokens=max(1, min(prompt, request.model(name).max_positions - most)),
        mean_prompt_tokens=mean,
        max_new_tokens=most,
        mean_new_tokens=max(1.0, min(float(most), workload.mean_new_tokens * share)),
        lengths=(),
    )
    return replace(request, workload=own)


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
    if len(request.graph.generates) > 1:
        return "the generate calls of a graph run side by side: none waits elsewhere for its turn"
    return "" if request.workload.staleness == 0 else "generate calls run all the time where samples may be stale"


def setting_of(
    request: PlanRequest, call: str, layout: Layout, cluster: Cluster, factors: EfficiencyFactors | None = None
) -> Setting:
    """A call under a layout, as the engines of a run do it, with their overheads. factors: measured ones, in the place
    of the shipped."""
    engine, generates = request.engine, isinstance(request.graph.calls[call], Generate)
    backend = engine.generate_backend if generates else engine.backend
    if engine.expert_copies:
        backend = replace(backend or backend_of(layout, cluster.is_cpu), expert_copies=True)
    if engine.cache_bytes is not None and generates:
        backend = replace(backend or backend_of(layout, cluster.is_cpu), cache_bytes=engine.cache_bytes)
    overheads, apart = request.overheads(cluster), layout.tp * layout.pp > cluster.devices_per_node
    if overheads != EngineOverheads(step_seconds=overheads.step_seconds):  # the end of a step is part of no call
        factors = with_overheads(factors or device_kind(cluster.kind).costs, overheads, apart)
    model, role, masked = request.model(call), request.role(call), generates and engine.masks_windows
    return Setting(model, role, layout, cluster, factors, backend, engine.cuts_served_experts, masked)


def setting_seconds(request: PlanRequest, call: str, setting: Setting, candidate: CallOption) -> float:
    """Predicted seconds of one mesh-holding call, its inputs' way to its devices and its engine's overheads included:
    see `formula_seconds`."""
    beside = input_seconds(request, call, setting.layout, setting.cluster)
    beside += overhead_seconds(request, call, setting.layout, setting.cluster)
    return beside + formula_seconds(request, call, setting, candidate)


def overhead_seconds(request: PlanRequest, call: str, layout: Layout, cluster: Cluster) -> float:
    """Seconds of one call that neither its passes nor its inputs explain: the controller's events, and the waking up of
    an engine whose devices others had.

    A session of generation is taken to wake up wherever another call may have had its devices, whatever the plan: what
    one call costs depends on no other call's place. A stream wakes up when it was paused: see `generate_work`.
    """
    overheads = request.overheads(cluster)
    seconds = overheads.call_device_seconds * layout.mesh.n_devices
    if isinstance(request.graph.calls[call], Generate) and _gives_way(request, call):
        seconds += _wake_seconds(request, call, cluster)
    return seconds


def _wake_seconds(request: PlanRequest, call: str, cluster: Cluster) -> float:
    overheads = request.overheads(cluster)
    return overheads.wake_seconds + overheads.wake_layer_seconds * request.model(call).layers


def step_end_seconds(request: PlanRequest, call: str, cluster: Cluster) -> float:
    """Seconds of the controller between a step's last call and the next step's first; 0 after other calls."""
    return request.overheads(cluster).step_seconds if call == request.graph.last_call else 0.0


def _gives_way(request: PlanRequest, call: str) -> bool:
    """True of a generate call whose engine has given up its caches when it starts."""
    alone = len(request.mesh_calls) == 1 or request.engine.own_devices
    return not (alone or request.workload.staleness or len(request.graph.generates) > 1)


def formula_seconds(request: PlanRequest, call: str, setting: Setting, candidate: CallOption) -> float:
    """Predicted seconds of what a call computes, by the formulas alone.

    A role's own gradient checkpointing counts besides the candidate's recomputation.
    """
    match request.graph.calls[call]:
        case Train():
            return train_seconds(setting, train_work(request, call, candidate))
        case Inference():
            return inference_seconds(setting, _packed_work(request, call, candidate))
        case Generate():
            return generate_seconds(setting, generate_work(request, call, candidate))
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
    padded = request.workload.n_samples * sample_tokens(request) * request.overheads(cluster).padded_token_seconds
    far = request.cluster.nodes > 1 or bool(request.cluster.more)
    return padded + transfer_seconds(cluster, nbytes / layout.dp, far=far)


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


def generate_work(request: PlanRequest, call: str, candidate: CallOption) -> GenerateWork:
    """The work of a generate call."""
    overheads = request.overheads(request.cluster)
    wake = _wake_seconds(request, call, request.cluster) if streams(request, call) else 0.0
    request = sized(request, call)
    workload = request.workload
    return GenerateWork(
        samples=workload.n_samples,
        samples_per_group=workload.samples_per_group,
        prompt_tokens=workload.expected_prompt_tokens,
        mean_new_tokens=workload.mean_new_tokens,
        max_new_tokens=workload.max_new_tokens,
        running=running_sequences(request, candidate.layout, candidate.tokens),
        lengths=workload.lengths,
        stall_seconds=overheads.interrupt_seconds,
        wake_seconds=wake,
    )


def train_work(request: PlanRequest, call: str, candidate: CallOption) -> TrainWork:
    """The work of a train call."""
    train = request.graph.calls[call]
    assert isinstance(train, Train)
    packed, own = _packed_work(request, call, candidate), sized(request, call).workload
    return replace(
        packed,
        longest_tokens=longest_expected(own, own.n_samples / train.minibatches),
        optimizer_steps=train.minibatches,
        epochs=train.epochs,
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
        return microbatches(setting, train_work(request, call, candidate))
    return microbatches(setting, _packed_work(request, call, candidate))


def _packed_work(request: PlanRequest, call: str, candidate: CallOption) -> TrainWork:
    request = sized(request, call)
    workload, mean = request.workload, mean_tokens(request)
    return TrainWork(
        tokens=math.ceil(workload.n_samples * mean),
        sample_tokens=mean,
        microbatch_tokens=candidate.tokens,
        prompt_tokens=workload.expected_prompt_tokens,
        samples_per_group=workload.samples_per_group,
        longest_tokens=longest_expected(workload, workload.n_samples),
        responses=lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths),
    )


@lru_cache(maxsize=256)
def longest_expected(workload: Workload, samples: float) -> int:
    """Tokens of the longest sample that one of so many is expected to have."""
    lengths = lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths)
    return math.ceil(workload.expected_prompt_tokens + lengths.expected_max(max(1.0, samples)))


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
    half a page, as its last one is not full, and what its next steps will take.

    1.15 covers the fluctuation of the sum over many sequences of all ages. The n samples of a group share the full
    pages of their prompt, which stay until the last one has ended. Where groups begin at a steady rate there are
    E[longest of n] / (n E[length]) prompts for each running sequence, as the renewal theory of `mean_age` has it.
    """
    workload = request.workload
    lengths = lengths_of(workload.mean_new_tokens, workload.max_new_tokens, workload.lengths)
    spare = CACHE_PAGE_TOKENS / 2 + CACHE_SPARE_TOKENS
    prompt, n = workload.expected_prompt_tokens, workload.samples_per_group
    shared = max(0, math.ceil(prompt) - 1) // CACHE_PAGE_TOKENS * CACHE_PAGE_TOKENS
    copies = min(1.0, lengths.expected_max(n) / (n * lengths.mean))
    return prompt - (1 - copies) * shared + 1.15 * lengths.mean_age + spare


def free_seconds(request: PlanRequest) -> dict[str, float]:
    """Predicted seconds of the calls that hold no mesh: functions and advantages."""
    samples, overheads = request.workload.n_samples, request.overheads(request.cluster)
    measured = request.costs.factors.function_seconds if request.costs.factors else None
    known = (seconds for seconds in (overheads.function_seconds, measured) if seconds is not None)
    function_seconds, workers = next(known, FUNCTION_SECONDS), overheads.function_workers or request.cluster.n_devices
    seconds: dict[str, float] = {}
    for name, call in request.graph.calls.items():
        if isinstance(call, Function):
            seconds[name] = function_seconds * math.ceil(samples / workers)
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
