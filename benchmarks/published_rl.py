"""Predictions for published speeds of generation, weight synchronisation and whole steps of RL systems.

What is assumed here is always a batch or lengths: such a prediction is marked as `unpublished` and counts in no figure.
"""

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from benchmarks.published import Prediction, Row
from benchmarks.published_assumed import AssumedSteps, areal, deepspeed_chat, openrlhf
from benchmarks.published_backends import in_eight_bits
from benchmarks.published_served import cache_room, most_sequences
from benchmarks.published_shapes import cluster_of, model_of
from benchmarks.published_steps import (
    BF16,
    MOST_RUNNING,
    SYSTEM,
    Batch,
    Engines,
    Way,
    engine_ranks,
    generate_request,
    layout_of,
    overheads,
    plan_for,
    reload_seconds,
    step_request,
    sync_request,
)
from realgraph.planner.costs.backend import backend_of
from realgraph.planner.costs.engine_overheads import NO_OVERHEADS
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.spread import regimes_of
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.inputs.model_configs import known_models
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.period_error import calls_error

CHAT_METRIC = "ppo_epoch_time_1024_prompts"
PHASES = ("generate", "inference", "e2e", "weight_sync")
# TensorRT-LLM's benchmark: requests by prompt and response length; in the cache every sequence reserves its whole
# length (its docs, perf-overview.md).
SERVED = re.compile(r"ISL (\d+) OSL (\d+)")
REQUESTS = {(128, 128): 30000, (128, 4096): 1500, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000}
MANY_REQUESTS = 3000
# NeMo-RL, examples/configs/recipes/llm/performance: problems of OpenMathInstruct-2 with a short prompt (the published
# tokens a step less those generated leave 100 to 130 a sample), 512 samples an optimizer step, log-probs of the policy
# and of the reference; asynchronous recipes generate on one half of the devices.
NEMO_PROMPT = 115
NEMO_TRAINED_AT_ONCE = 512
NEMO_GROUP = 32
NVL72_PER_NODE = 4
# verl's recipes of DAPO on Qwen2.5-Math-7B: 512 prompts x 16 answers, 16 optimizer steps of 32 groups. Mean lengths are
# not published. 1,200 tokens were set once, with the seconds of generation of these rows in view; its log-prob passes
# alone would say 1,500 (answers of up to 8,192) and 2,000 (up to 28,672). The report marks them as assumed.
VERL_SAMPLES, VERL_GROUP, VERL_STEPS, VERL_PROMPT = 8192, 16, 16, 150
VERL_MEAN = 1200.0
VERL_SPLIT = re.compile(r"(\d+):(\d+) \(rollout:train\)|\((\d+) gen\+(\d+) train")
ASSUMED = ("AReaL", "OpenRLHF", "DeepSpeed-Chat")  # whose sources leave out what decides a step
# How weights get to engines, by a word of the notes. Megatron's whole tensors go to every rank.
SYNC_WAYS: tuple[tuple[str, Way], ...] = (
    ("full broadcast", "one_rank"),
    ("checkpoint-engine=on", "buckets"),
    ("checkpoint-engine=off", "whole"),
)
SYNC_DEVICES = 8  # of one node, where a source does not tell
SHAPES = (
    (r"^llama v3\.1 8b", "meta-llama/Llama-3.1-8B"),
    (r"^llama v3\.1 70b", "meta-llama/Llama-3.1-70B"),
    (r"^7b dense", "Qwen/Qwen2.5-7B"),
    (r"^32b dense", "Qwen/Qwen2.5-32B"),
    (r"^72b dense", "Qwen/Qwen2.5-72B"),
    (r"^llama-?2-70b", "meta-llama/Llama-2-70b-hf"),
    (r"^30b-a3b", "Qwen/Qwen3-30B-A3B"),
)


def predictions(rows: Sequence[Row]) -> Iterator[Prediction]:
    """Predictions of generation, inference, whole steps and weight synchronisation; other rows are passed over."""
    for row in rows:
        found = _prediction(row) if row.phase in PHASES else ""
        if isinstance(found, Prediction):
            yield found


def unpredicted(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Rows of these phases that no prediction answers, each with the reason."""
    for row in rows:
        found = _prediction(row) if row.phase in PHASES else ""
        if isinstance(found, str) and found:
            yield row, found


def _prediction(row: Row) -> Prediction | str:
    model, cluster = _shape(row), cluster_of(row)
    if model is None:
        return f"no shape known of {row.model}"
    if cluster is None:
        return f"no machine known of {row.n_gpus or 1} x {row.gpu}"
    if row.number("value") <= 0:
        return "no measured value"
    if row.phase == "e2e" and row.system.startswith(ASSUMED):
        return _assumed(row, model, cluster)
    if row.phase == "weight_sync":
        return _sync(row, model, cluster)
    derived = row.phase == "e2e" and row.metric == "throughput_per_gpu"
    if derived or row.metric == "exposed_wait_for_gen":
        return "follows from the step's seconds"
    if row.phase == "generate" and SERVED.search(row.notes):
        return _served(row, model, cluster)
    if row.phase != "weight_sync" and not row.count("n_gpus"):
        return "the number of devices is not published"
    if row.system.startswith("verl"):
        return _verl(row, model, cluster)
    if row.phase == "e2e" and row.metric == "step_time":
        return _step(row, model, cluster)
    return "nothing known of the system's configuration"


def _shape(row: Row) -> ModelSpec | None:
    """The shape behind a row, by the last part of a Hub id too."""
    for pattern, name in SHAPES:
        if re.search(pattern, row.model, re.IGNORECASE):
            return model_of(replace(row, model=name))
    ids = (name for name in known_models() if name.split("/")[-1].lower() == row.model.lower())
    return model_of(replace(row, model=next(ids, row.model)))


def _timed(row: Row, model: ModelSpec, phase: str, seconds: float, assumed: str = "") -> Prediction | str:
    """A prediction of seconds, in the row's unit."""
    found = row.in_unit(seconds)
    return found if isinstance(found, str) else _compared(row, model, phase, found, assumed)


def _compared(row: Row, model: ModelSpec, phase: str, predicted: float, assumed: str = "") -> Prediction:
    group = f"{row.source.split('@')[0].strip()} | {row.model} | {row.metric}"
    family = "tensorrt-llm" if row.system.startswith("TensorRT-LLM") else "rl"
    return Prediction(
        row, phase, group, row.number("value"), predicted, model.experts > 0, family, assumed, unpublished=bool(assumed)
    )


def _assumed(row: Row, model: ModelSpec, cluster: Cluster) -> Prediction | str:
    """A step under assumptions of published_assumed.py."""
    if not row.count("n_gpus"):
        return "the number of devices is not published"
    found: AssumedSteps | str
    if row.system.startswith("AReaL"):
        found = areal(row, model, cluster)
    elif row.metric != CHAT_METRIC:
        return "nothing known of the system's configuration"
    else:
        found = openrlhf(model, cluster) if row.system.startswith("OpenRLHF") else deepspeed_chat(model, cluster)
    if isinstance(found, str):
        return found
    plan = plan_for(found.request)
    return plan if isinstance(plan, str) else _whole(row, model, (found.request, plan), found.said, found.steps)


# --- generation -------------------------------------------------------------------------------------------------------


def _served(row: Row, model: ModelSpec, cluster: Cluster) -> Prediction | str:
    """Output tokens a second, all requests at once, from the first prompt to the last token."""
    lengths = SERVED.search(row.notes)
    assert lengths is not None
    prompt, new = int(lengths[1]), int(lengths[2])
    if not new:
        return "no new tokens"
    if not row.unit.startswith("token"):
        return f"no speed in tokens: {row.unit or 'no unit'}"
    tp, pp = row.count("tp", 1) or 1, row.count("pp", 1) or 1
    if pp > model.layers:
        return "more stages than layers"
    layout = Layout(DeviceMesh(0, tp * pp), tp=tp, pp=pp)
    serving = backend_of(layout)
    if "FP8" in row.notes:
        serving = in_eight_bits(serving, device_kind(cluster.kind).costs.fp8, cache_bytes=1)
    setting = Setting(model, BF16, layout, cluster, backend=serving)
    own = row.system.startswith("TensorRT-LLM")
    most = most_sequences(row, prompt + new) if own else MOST_RUNNING
    room = cache_room(setting, most)
    running = int(room * pp / (cache_bytes_per_token(setting) * (prompt + new)))
    engine = replace(SYSTEM, overheads=NO_OVERHEADS if own else overheads(), generate_backend=serving, max_running=most)
    requests = REQUESTS.get((prompt, new), MANY_REQUESTS)
    batch = Batch(samples=requests, per_group=1, prompt=prompt, mean=new, limit=new)
    request = generate_request(model, (layout, cluster), engine, batch, max(1, min(most, running)))
    plan = plan_for(request)
    if isinstance(plan, str):
        return plan
    devices = max(tp * pp, row.count("n_gpus", tp * pp))
    found = requests * new / plan.period_seconds * devices / (tp * pp)
    made = _compared(row, model, "generate", found / devices if "per_gpu" in row.metric else found)
    return replace(made, regimes=tuple(regimes_of("generate", model, layout)))


def _sync(row: Row, model: ModelSpec, cluster: Cluster) -> Prediction | str:
    """Trained weights to engines, as the notes have it; where nothing says how many devices take part, one node's."""
    ranks = re.search(r"rollout ranks (\d+)", row.notes)
    devices = max(1, int(ranks[1])) if ranks else cluster.n_devices
    least = row.in_unit(2 * model.n_params() / cluster.link_bytes_per_s / engine_ranks(model, devices))
    if isinstance(least, float) and row.number("value") < least:
        return "faster than the link of a device carries its weights"
    plan = plan_for(sync_request(model, cluster, devices, _way(row)))
    if isinstance(plan, str):
        return plan
    seconds = plan.reallocation_seconds["rollout"]
    if "param offload on" in row.notes:
        seconds += reload_seconds(model, SYNC_DEVICES)
    return _timed(row, model, "weight_sync", seconds)


def _way(row: Row) -> Way:
    for sign, way in SYNC_WAYS:
        if sign in row.notes:
            return way
    return "sharded"


# --- whole steps ------------------------------------------------------------------------------------------------------


def _step(row: Row, model: ModelSpec, cluster: Cluster) -> Prediction | str:
    """A step whose batch, lengths and layouts are all published, on a system in the manner of NeMo-RL."""
    if "SUSPECT" in row.notes:
        return "the printed batch does not agree with the printed throughput"
    mean, tp = re.search(r"avg gen len (\d+)", row.notes), re.search(r"gen TP(\d+)", row.notes)
    if mean is None or tp is None or not row.count("global_batch"):
        return "lengths, batch or the engine's layout are not published"
    longest = row.count("seq_len")
    if longest <= NEMO_PROMPT or not 0 < int(mean[1]) <= longest:
        return "no lengths that the mean and the limit agree on"
    devices, samples = row.count("n_gpus"), row.count("global_batch")
    late = "1-step Off" in row.notes
    if cluster.kind.startswith("GB"):  # an engine starts a process a node, though NVLink joins the nodes of a rack
        nodes = max(1, devices // NVL72_PER_NODE)
        near, far = min(devices, NVL72_PER_NODE), cluster.link_bytes_per_s
        cluster = replace(cluster, nodes=nodes, devices_per_node=near, nic_bytes_per_s=far)
    part = devices // 2 if late else devices
    train = _train_layout(row, part)
    if not 0 < int(tp[1]) <= part or train.tp * train.pp * train.cp > part or train.ep > part:
        return "the layouts need more devices than there are"
    if train.pp > model.layers:
        return "more stages than layers"
    engines = Engines(
        generate=layout_of(part, int(tp[1])),
        train=train,
        colocated=not late,
        memory_share=0.8 if late else 0.6,
        microbatch=longest,
        fp8="; FP8" in row.notes,
    )
    batch = Batch(
        samples=samples,
        per_group=NEMO_GROUP if samples == 2048 or "235B" in row.model else NEMO_GROUP // 2,
        prompt=NEMO_PROMPT,
        mean=float(mean[1]),
        limit=longest - NEMO_PROMPT,
        steps=max(1, samples // NEMO_TRAINED_AT_ONCE),
        passes=("old", "ref"),
        staleness=int(late),
    )
    return _planned(row, model, step_request(model, cluster, engines, batch))


def _planned(row: Row, model: ModelSpec, request: PlanRequest, said: str = "") -> Prediction | str:
    """A step as its plan has it."""
    plan = plan_for(request)
    return plan if isinstance(plan, str) else _whole(row, model, (request, plan), said)


def _whole(
    row: Row, model: ModelSpec, planned: tuple[PlanRequest, Plan], said: str, steps: float = 1.0
) -> Prediction | str:
    """So many steps of a plan, beside what its calls' errors make of its period's."""
    request, plan = planned
    found = _timed(row, model, "rl_step", plan.period_seconds * steps, said)
    return found if isinstance(found, str) else replace(found, beside=calls_error(request, plan))


def _train_layout(row: Row, devices: int) -> Layout:
    tp, pp, cp, ep = (max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp", "ep"))
    return Layout(DeviceMesh(0, devices), dp=max(1, devices // (tp * pp * cp)), tp=tp, pp=pp, ep=ep, cp=cp)


def _verl(row: Row, model: ModelSpec, cluster: Cluster) -> Prediction | str:
    longest = row.count("seq_len")
    if longest <= VERL_MEAN:
        return "lengths are not published"
    devices, split = row.count("n_gpus"), VERL_SPLIT.search(row.notes)
    parts = [int(found) for found in split.groups() if found] if split else [devices, devices]
    if not all(parts):
        return "no devices on one of the sides"
    batch = Batch(VERL_SAMPLES, VERL_GROUP, VERL_PROMPT, VERL_MEAN, longest, steps=VERL_STEPS)
    engines = Engines(
        generate=layout_of(parts[0]),
        train=layout_of(parts[1], sharded="FSDP" in row.notes),
        colocated=split is None,
        microbatch=longest + 2048,
    )
    if split:
        batch = replace(batch, staleness=1, passes=() if "fully async" in row.notes else ("old",))
    said = f"mean answer {batch.mean:,.0f} tokens, set with these rows in view"
    if row.metric == "step_time":
        return _planned(row, model, step_request(model, cluster, engines, batch), said)
    parts_of = {"generate_time": ("generate", "rollout"), "old_log_prob_time": ("inference", "old_logp")}
    if row.metric not in parts_of:
        return f"nothing known of {row.metric or 'the metric'}"
    phase, call = parts_of[row.metric]  # of a batch as a whole
    plan = plan_for(step_request(model, cluster, engines, replace(batch, staleness=0)))
    if isinstance(plan, str):
        return plan
    found = _timed(row, model, phase, plan.allocations[call].seconds, said)
    regimes = regimes_of("generate", model, engines.generate) if call == "rollout" else ("plain",)
    return found if isinstance(found, str) else replace(found, regimes=tuple(regimes))
