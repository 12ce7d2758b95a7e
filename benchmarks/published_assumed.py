"""Steps of RL systems whose sources leave out something that decides them: what is assumed instead, and from where.

No constant is set by a measured value; one length follows from it (AReaL's 1.5B: tokens a second times its hours). Each
prediction carries its assumptions; the report prints them.
"""

import re
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published import Row
from benchmarks.published_backends import DEEPSPEED_CHAT, ZERO3
from benchmarks.published_steps import (
    BF16,
    Batch,
    Engines,
    layout_of,
    overheads,
    step_request,
    with_running,
)
from benchmarks.static_batches import static_generate_seconds
from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.generate.generate import GenerateWork
from realgraph.planner.costs.lengths import Lengths, lengths_of, lognormal
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request.cost_table import MeasuredCall
from realgraph.planner.request.request import PlanRequest, call_hashes


class AssumedSteps(Struct, frozen=True):
    """Steps that a row is about, the request of one of them, and what is assumed."""

    request: PlanRequest
    said: str
    steps: float = 1.0


# --- AReaL, blogs of v0.2 and v0.3, arXiv:2505.24298 ------------------------------------------------------------------

# v0.2, "Rollout Strategy": 512 questions x 16 answers of at most 27K tokens, of which fewer than 5 % were cut; four
# minibatches, which the hours' table counts as steps. No critic and no KL term: one pass of log-probs.
AREAL_BATCH = Batch(samples=8192, per_group=16, prompt=150, mean=0.0, limit=27648, steps=4)
AREAL_CUT = 0.05
AREAL_STALENESS = 4
AREAL_MICROBATCH = 32768
# Trainers of its benchmark folder, v0.3.0: pipeline stages and tp by billions of parameters; engines of one device, of
# four for 14B (v0.3's plan for 48 nodes), eight for 32B; on three quarters of the devices (paper). Synchronous is the
# same system with a bound of 0: the hours of 1.5B, synchronous over asynchronous, are as 356.6 to 128.7 thousand tokens
# a second at bounds of 4 and 0 (paper, figure 5c). Both say 76.0 million tokens a batch: with the share of cut answers,
# mean and spread of 1.5B's lengths; of 7B's, with the usual spread, that share tells the mean.
# At most 512 groups in flight, each until its last answer is done; new weights through files in either mode, which are
# looked for every 5 s (v0.3.0's rollout manager).
AREAL_TRAINERS = ((4.0, 2, 1, 1), (10.0, 4, 1, 1), (20.0, 8, 2, 4), (1e9, 8, 2, 8))
AREAL_IN_FLIGHT = 512 * 16
AREAL_LOOKS_SECONDS = 5.0
AREAL_SHARE = 0.75
AREAL_TOKENS = ((4.0, 76.0e6),)  # of prompts and answers in a batch, by billions of parameters
N_QUANTILES = 256
AREAL_STEPS = re.compile(r"hours_for_(\d+)_ppo_steps")


def areal(row: Row, model: ModelSpec, cluster: Cluster) -> AssumedSteps | str:
    """Seconds of so many PPO steps."""
    counted = AREAL_STEPS.fullmatch(row.metric)
    mode = re.match(r"(sync|async)\b", row.notes)
    if counted is None or mode is None:
        return "neither a table of hours nor synchronous or asynchronous"
    devices = row.count("n_gpus")
    stages, tp, engine = next(found[1:] for found in AREAL_TRAINERS if model.n_params() < found[0] * 1e9)
    part = round(devices * AREAL_SHARE) // engine * engine
    left = (devices - part) // (stages * tp) * stages * tp
    if not part or not left or not float(counted[1]):
        return "fewer devices than its layouts need"
    engines = Engines(
        generate=layout_of(part, engine),
        train=layout_of(left, tp, stages),
        colocated=False,
        memory_share=0.8,
        microbatch=AREAL_MICROBATCH,
        controller=False,
        in_flight=AREAL_IN_FLIGHT,
        way="files",
        looks_seconds=AREAL_LOOKS_SECONDS,
    )
    mean, lengths, known = _areal_lengths(model)
    batch = replace(AREAL_BATCH, mean=mean, lengths=lengths, staleness=AREAL_STALENESS if mode[1] == "async" else 0)
    said = (
        f"mean answer {mean:,.0f} tokens ({known}), a batch is four steps, "
        f"{part} devices generate and {left} train (pp{stages} tp{tp})"
    )
    return AssumedSteps(step_request(model, cluster, engines, batch), said, float(counted[1]) / AREAL_BATCH.steps)


def _areal_lengths(model: ModelSpec) -> tuple[float, tuple[int, ...], str]:
    """Mean tokens of an answer; quantiles where the share of cut answers is known besides; and what is said."""
    cut = f"{AREAL_CUT:.0%} cut at {AREAL_BATCH.limit:,}"
    published = next((tokens for billions, tokens in AREAL_TOKENS if model.n_params() < billions * 1e9), None)
    if published is None:
        return mean_with_cut(AREAL_BATCH.limit, AREAL_CUT), (), cut
    mean = published / AREAL_BATCH.samples - AREAL_BATCH.prompt
    known = lengths_with_cut(mean, AREAL_BATCH.limit, AREAL_CUT)
    places = [(i + 0.5) / N_QUANTILES for i in range(N_QUANTILES)]
    return (
        mean,
        tuple(round(known.quantile(place)) for place in places),
        f"{published / 1e6:.1f} million a batch, {cut}",
    )


def mean_with_cut(limit: int, share: float) -> float:
    """Mean tokens of log-normal lengths of which `share` reach the limit, by bisection."""
    return _bisected(1.0, float(limit), lambda mean: _cut_share(lengths_of(mean, limit), limit) < share)


def lengths_with_cut(mean: float, limit: int, share: float) -> Lengths:
    """Log-normal lengths of this mean of which `share` reach the limit: the wider, the more do."""
    deviation = _bisected(0.1, 3.0, lambda wide: _cut_share(lognormal(mean, limit, wide), limit) < share)
    return lognormal(mean, limit, deviation)


def _cut_share(lengths: Lengths, limit: int) -> float:
    return float(lengths.survival(np.array([limit - 1.0]))[0])


def _bisected(low: float, high: float, too_small: Callable[[float], bool]) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return (low + high) / 2


# --- OpenRLHF and DeepSpeed-Chat, as OpenRLHF's authors measured both -------------------------------------------------

# benchmark/README.md of 2024: prompts and answers of up to 1,024 tokens, all taken to be as long, as DeepSpeed-Chat's
# benchmark settings want it; 1,024 samples, 128 an optimizer step; reward model and critic as large as the actor;
# reference, reward, actor, critic and engines on 1 : 1 : 2 : 2 : 2 eighths of the devices; states of Adam on the host.
CHAT_BATCH = Batch(
    samples=1024, per_group=1, prompt=1024, mean=1024.0, limit=1024, steps=8, passes=("old", "ref"), critic=True
)
CHAT_TOKENS = 2048
CHAT_MICROBATCH = 4 * CHAT_TOKENS
EIGHTHS_SMALL, EIGHTHS_LARGE = 1, 2
# Every rank of the actor asks the engines for so many samples and waits for them before it asks again, by billions of
# parameters (the same table's micro_batch_size of generation; for 34B, where it is empty, as for 70B).
CHAT_ASKED = ((10.0, 16), (20.0, 8), (1e9, 4))
ENGINE_FILL = 0.45  # of a device's memory that an engine's weights may take: tp is the least that keeps to it
CPU_ADAM_SECONDS = 2.6e-10  # of a parameter on one host's cores (CPU-Adam of ZeRO-Offload, arXiv:2101.06840)
# DeepSpeed-Chat generates without continuous batching, layer by layer from Python, on all devices: samples at once on a
# device by billions of parameters (the same table), in training and scoring too. A layer's launches and hooks, which
# nothing hides: from its own post of April 2023 (microsoft/DeepSpeed, blogs/deepspeed-chat): 131.9 thousand prompts and
# answers of 256 tokens on A100-80GB, OPT-13B in 9 h on 8 and 1.25 h on 64, OPT-66B in 2.1 days and 7.5 h. With its
# scripts' 16 and 4 samples a device (tp 2 and 8), what arithmetic leaves is 1.8 to 2.3 ms a layer and token step.
CHAT_RUNNING = ((10.0, 8), (1e9, 2))
EAGER_LAYER_SECONDS = 2.0e-3


def openrlhf(model: ModelSpec, cluster: Cluster) -> AssumedSteps:
    """Seconds of one PPO batch: engines, then four passes side by side, then actor and critic side by side."""
    devices = cluster.n_devices
    small, large = (max(1, devices * eighths // 8) for eighths in (EIGHTHS_SMALL, EIGHTHS_LARGE))
    tp = _least_tp(model, cluster)
    asked = next(most for billions, most in CHAT_ASKED if model.n_params() < billions * 1e9)
    generate, actor = layout_of(max(large, tp), tp), layout_of(large, sharded=True)
    ends = [generate.mesh.n_devices, *([large] * 2), *([small] * 2)]
    firsts = [sum(ends[: i + 1]) for i in range(len(ends))]
    critic, ref, scores = (
        replace(layout_of(size, sharded=True), mesh=DeviceMesh(first, size))
        for first, size in zip(firsts[1:], (large, small, small), strict=False)
    )
    engines = replace(
        _chat_engines(generate, actor, _host_adam(ZERO3, model, cluster, large)),
        way="one_rank",
        places={"values": critic, "train_critic": critic, "ref_logp": ref, "score": scores},
    )
    request = step_request(model, cluster, engines, CHAT_BATCH)
    running = min(request.workload.max_running or 1, max(1, round(asked * large / generate.dp)))
    said = (
        f"prompts and answers of 1,024 tokens, 128 samples an optimizer step, {small} devices each for reference and "
        f"reward, {large} each for actor, critic and engines (tp{tp}), {asked} samples at once for each of the actor"
    )
    return AssumedSteps(with_running(request, running), said)


def deepspeed_chat(model: ModelSpec, cluster: Cluster) -> AssumedSteps:
    """Seconds of one PPO batch: every model on all devices, one after the other. Its generation, which no engine of the
    planner's runs so, is handed to the planner as if measured."""
    devices = cluster.n_devices
    running = next(most for billions, most in CHAT_RUNNING if model.n_params() < billions * 1e9)
    tp = min(devices, _least_tp(model, cluster))  # its engine gathers whole layers on so many devices together
    eager = hybrid_engine(Setting(model, BF16, layout_of(devices, tp, sharded=True), cluster))
    work = GenerateWork(CHAT_BATCH.samples, 1, CHAT_BATCH.prompt, CHAT_BATCH.mean, CHAT_BATCH.limit, running * tp)
    adam = _host_adam(DEEPSPEED_CHAT, model, cluster, devices)
    engines = _chat_engines(layout_of(devices, tp), layout_of(devices, sharded=True), adam)
    engines = replace(engines, colocated=True, sleeps=False, microbatch=running * CHAT_TOKENS)
    request = step_request(model, cluster, engines, CHAT_BATCH)
    said = f"prompts and answers of 1,024 tokens, 128 samples an optimizer step, {running} samples at once on a device"
    return AssumedSteps(_with_generation(request, static_generate_seconds(eager, work)), said)


def _with_generation(request: PlanRequest, seconds: float) -> PlanRequest:
    """The request in which generation takes so long; new weights are there without being brought."""
    pin = request.pins["rollout"]
    shape, workload = call_hashes(request, "rollout")
    assert pin.devices and pin.dp and pin.tp
    call = MeasuredCall(
        call="rollout",
        phase="generate",
        model=shape,
        workload=workload,
        devices=pin.devices,
        dp=pin.dp,
        tp=pin.tp,
        pp=1,
        ep=1,
        cp=1,
        sharding="replicated",
        seconds=seconds,
        predicted_seconds=0.0,
        kv_cache_tokens=pin.kv_cache_tokens,
    )
    own = replace(
        overheads(), sync_seconds=0.0, sync_tensor_seconds=0.0, sync_bytes_per_s=0.0, padded_token_seconds=0.0
    )
    return replace(request, costs=replace(request.costs, calls=(call,), overheads=own))


def _least_tp(model: ModelSpec, cluster: Cluster) -> int:
    """Devices over which an engine cuts its weights."""
    room = ENGINE_FILL * cluster.memory_bytes
    return next((n for n in (1, 2, 4, 8) if 2 * model.n_params() / n <= room), 8)


def hybrid_engine(setting: Setting) -> Setting:
    """DeepSpeed-Chat's engine for generation."""
    eager = replace(setting.costs, layer_seconds=EAGER_LAYER_SECONDS)
    return replace(setting, factors=eager, backend=DEEPSPEED_CHAT)


def _chat_engines(generate: Layout, train: Layout, backend: Backend) -> Engines:
    return Engines(
        generate=generate,
        train=train,
        colocated=False,
        microbatch=CHAT_MICROBATCH,
        controller=False,
        backend=backend,
    )


def _host_adam(engine: Backend, model: ModelSpec, cluster: Cluster, devices: int) -> Backend:
    """The engine with optimizer steps on the hosts: gradients down and weights up in 16 bits, and Adam on all their
    cores."""
    hosts = max(1.0, devices / cluster.devices_per_node)
    moved = 4 * model.n_params() / devices / cluster.pcie_bytes_per_s
    return replace(engine, step_seconds=engine.step_seconds + CPU_ADAM_SECONDS * model.n_params() / hosts + moved)
