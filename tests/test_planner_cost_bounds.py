"""Predictions on every kind of device, at any length and precision: what no device can beat, and what extrapolates."""

import heapq
import itertools
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.published_backends import DEEPSPEED_CHAT, ZERO3
from benchmarks.published_generation import generation
from benchmarks.static_batches import batches, static_generate_seconds, static_occupancy, static_phases
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import TrainWork, spread, train_seconds
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.generate.generate import GenerateWork
from realgraph.planner.costs.lengths import lognormal, measured
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import mean_context
from realgraph.planner.inputs.devices import device_kinds
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, eight_bit, known

BF16 = ModelRole(trainable=True, dtype="bfloat16")
MODELS = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-235B-A22B",
)
GPUS = sorted(kind for kind in device_kinds() if kind != "cpu")


@st.composite
def layouts(draw: st.DrawFn, experts: int) -> Layout:
    """tp within and over nodes, cp, pp, and ep over dp."""
    tp, cp, pp = draw(st.sampled_from((1, 2, 8, 16))), draw(st.sampled_from((1, 4))), draw(st.sampled_from((1, 4)))
    dp = draw(st.sampled_from((1, 4, 16)))
    ep = draw(st.sampled_from([n for n in (1, 4, 16) if dp % n == 0])) if experts else 1
    return Layout(DeviceMesh(0, tp * cp * pp * dp), dp=dp, tp=tp, pp=pp, ep=ep, cp=cp)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Setting, TrainWork]:
    """A train call on any kind of GPU, of samples of up to 128k tokens."""
    model = known(draw(st.sampled_from(MODELS)))
    layout = draw(layouts(model.experts))
    machine = cluster(draw(st.sampled_from(GPUS)), 8, -(-layout.mesh.n_devices // 8))
    sample = draw(st.sampled_from((64.0, 2048.0, 131072.0)))
    work = TrainWork(
        tokens=round(sample * draw(st.sampled_from((16, 1024)))),
        sample_tokens=sample,
        microbatch_tokens=max(draw(st.sampled_from((4096, 65536))), round(sample) // layout.cp),
        optimizer_steps=draw(st.sampled_from((1, 8))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
    )
    setting = Setting(model, BF16, layout, machine)
    return eight_bit(setting) if draw(st.booleans()) else setting, work


@settings(max_examples=150)
@given(calls())
def test_no_call_beats_the_peak_of_its_devices(call: tuple[Setting, TrainWork]) -> None:
    setting, work = call
    model, devices = setting.model, setting.layout.mesh.n_devices
    products = 2 * model.active_params() + model.head_flops("lm")
    attention = 4 * model.attention_width() * work.context * model.layers
    peak = setting.cluster.flops * devices * (2 if setting.engine.product_speedup > 1 else 1)
    least = work.tokens * (products + attention) / peak
    passed, trained = inference_seconds(setting, work), train_seconds(setting, work)
    assert math.isfinite(passed) and math.isfinite(trained)
    assert passed > least
    assert trained > 3 * least


@settings(max_examples=100)
@given(st.data(), st.sampled_from(GPUS), st.sampled_from(MODELS), st.booleans())
def test_no_generation_beats_the_memory_of_its_devices(
    data: st.DataObject, kind: str, name: str, one_byte: bool
) -> None:
    model = known(name)
    tp = data.draw(st.sampled_from((1, 8, 16)))
    setting = Setting(model, BF16, Layout(DeviceMesh(0, tp), tp=tp), cluster(kind, 8, -(-tp // 8)))
    mean = data.draw(st.sampled_from((16.0, 1000.0, 60000.0)))
    work = GenerateWork(64, 8, 500.0, mean, 131072, data.draw(st.sampled_from((1, 16, 256))))
    if one_byte:
        setting = eight_bit(setting, cache_bytes=1)
    found = generation(setting, work)
    assert 0 < found.roofline_share < 1
    assert found.seconds >= found.decode_seconds > 0
    read = 64 * mean * (500 + mean / 2) * cache_bytes_per_token(setting)
    assert found.decode_seconds > read / setting.cluster.memory_bytes_per_s


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_seconds_of_a_pass_rise_smoothly_with_tokens_and_context(kind: str, name: str) -> None:
    """No step of more than what one further micro-batch costs, from 1k to 128k tokens a sample."""
    setting = Setting(known(name), BF16, Layout(DeviceMesh(0, 8), dp=1, tp=8), cluster(kind, 8))
    lengths = [1024 * 1.05**i for i in range(100)]
    seconds = [
        inference_seconds(setting, TrainWork(tokens=1 << 24, sample_tokens=length, microbatch_tokens=1 << 17))
        for length in lengths
    ]
    assert all(a < b < 1.06 * a for a, b in itertools.pairwise(seconds))


@pytest.mark.parametrize("seed", range(10))
def test_the_mean_context_is_that_of_all_tokens(seed: int) -> None:
    rng = random.Random(seed)
    new = [rng.randint(1, 5000) for _ in range(2000)]
    prompt = rng.randint(0, 2000)
    positions = sum((prompt + n) ** 2 / 2 for n in new) / sum(prompt + n for n in new)
    assert mean_context(prompt, measured(new)) == pytest.approx(positions, rel=1e-3)


@pytest.mark.parametrize("mean", [500.0, 4000.0, 12000.0])
def test_unequal_samples_attend_to_more_than_half_their_mean(mean: float) -> None:
    equal = TrainWork(tokens=1 << 22, sample_tokens=mean, microbatch_tokens=16384)
    uneven = replace(equal, longest_tokens=32768)
    known_lengths = mean_context(100.0, lognormal(mean - 100, 32668))
    assert equal.context == mean / 2 < known_lengths < 1.02 * uneven.context
    assert replace(uneven, prompt_tokens=100.0).context == pytest.approx(known_lengths)
    shorter = lognormal(mean - 200, 32668)
    assert replace(uneven, responses=shorter).context == mean_context(0.0, shorter)
    assert replace(uneven, prompt_tokens=mean).context == mean / 2
    assert replace(equal, longest_tokens=round(mean)).context == pytest.approx(mean / 2)
    setting = Setting(known(MODELS[1]), BF16, Layout(DeviceMesh(0, 8), dp=8), cluster("H100-SXM", 8))
    for seconds in (train_seconds, inference_seconds):
        assert seconds(setting, uneven) > seconds(setting, equal)


def dealt(lengths: list[float], ranks: int) -> float:
    """Tokens of the fullest rank, longest first, each to the rank with the fewest."""
    loads = [0.0] * ranks
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)


@pytest.mark.parametrize(("per_rank", "error"), [(1, 0.05), (2, 0.2), (4, 0.12), (8, 0.1), (32, 0.02)])
@pytest.mark.parametrize(("mean", "limit"), [(1200.0, 28672), (3200.0, 4096), (9000.0, 27648)])
def test_the_busiest_rank_is_that_of_samples_dealt_by_length(
    mean: float, limit: int, per_rank: int, error: float
) -> None:
    ranks, lengths = 32, lognormal(mean, limit)
    rng, samples = np.random.default_rng(per_rank), per_rank * ranks
    drawn = np.interp(rng.random((40, samples)), lengths.shares, lengths.tokens)
    ratio = statistics.fmean(dealt(list(one), ranks) / (one.sum() / ranks) for one in drawn)
    longest = round(lengths.expected_max(samples))
    work = TrainWork(round(mean * samples), mean, 32768, longest_tokens=longest)
    setting = Setting(known(MODELS[0]), BF16, Layout(DeviceMesh(0, 32), dp=32), cluster("H100-SXM", 8, 4))
    assert spread(setting, work, mean * per_rank) == pytest.approx(ratio, rel=error)
    assert spread(setting, replace(work, longest_tokens=None), mean * per_rank) == pytest.approx(1)
    assert spread(setting, replace(work, longest_tokens=None), mean / 2) == pytest.approx(2)  # half of the ranks idle


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(1, 64), st.floats(50, 2000), st.booleans())
def test_padded_batches_run_to_their_longest(samples: int, running: int, mean: float, sharded: bool) -> None:
    layout = Layout(DeviceMesh(0, 8), dp=8, sharding="fsdp" if sharded else "replicated")
    setting = Setting(known(MODELS[1]), BF16, layout, cluster("A800", 8))
    work = GenerateWork(8 * samples, 1, 256.0, mean, 4096, running)
    static = replace(setting, backend=DEEPSPEED_CHAT)
    assert static_phases(static, work)[1] > 0.9 * generation(setting, work).decode_seconds
    equal = replace(work, mean_new_tokens=4096)
    assert static_generate_seconds(static, equal) * (1 + 1e-9) > static_generate_seconds(static, work)
    count, size = batches(samples, running)
    assert count * size == pytest.approx(samples) and size <= running
    shape, lengths = static_occupancy(lognormal(mean, 4096), samples, running, 8, sharded), lognormal(mean, 4096)
    assert shape.alone.sum() <= shape.steps.sum() <= count * 4096 * (1 + 1e-9)
    assert shape.alone.sum() >= 0.98 * count * lengths.expected_max(size)


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize(("samples", "running"), [(8, 8), (64, 8), (60, 4)])
def test_padded_batches_take_what_draws_show(samples: int, running: int, in_step: bool) -> None:
    rng, replicas, lengths = np.random.default_rng(samples), 8, lognormal(500.0, 4096)
    count = samples // running
    drawn = np.interp(rng.random((400, replicas, count, running)), lengths.shares, lengths.tokens).max(axis=3)
    ends = drawn.max(axis=1).sum(axis=1) if in_step else drawn.sum(axis=2).max(axis=1)
    shape = static_occupancy(lengths, samples, running, replicas, in_step)
    assert shape.seconds(lambda running, age: np.ones_like(age)) == pytest.approx(ends.mean(), rel=0.03)


def test_eager_modules_and_unfused_attention_cost_time() -> None:
    layout = Layout(DeviceMesh(0, 16), dp=16, sharding="fsdp")
    setting = Setting(known(MODELS[1]), BF16, layout, cluster("A800", 8, 2), backend=ZERO3)
    work = TrainWork(tokens=1 << 21, sample_tokens=2048.0, microbatch_tokens=8192)
    eager = replace(setting, backend=DEEPSPEED_CHAT)
    fused = replace(setting, backend=replace(ZERO3, elementwise=1.0))
    assert train_seconds(fused, work) < train_seconds(setting, work) < train_seconds(eager, work)
    assert train_seconds(eager, work) < 2.5 * train_seconds(fused, work)
