"""Predicted seconds of generation: against a slow simulation, and against common sense."""

import heapq
import math
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.published_generation import generation
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.generate.decode import EXPERT_HALF_COLUMNS, decode_seconds, decode_step
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds, prefill_seconds
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.lengths import lengths_of, lognormal
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.stages import head_layers
from tests.planner_cases import cluster, eight_bit, known

BF16 = ModelRole(dtype="bfloat16")


def setting(name: str = "meta-llama/Llama-3.1-8B", devices: int = 1, kind: str = "H100-SXM", tp: int = 1) -> Setting:
    layout = Layout(DeviceMesh(0, devices), dp=devices // tp, tp=tp)
    return Setting(known(name), BF16, layout, cluster(kind, devices))


def decode_by_events(point: Setting, work: GenerateWork, lengths: Sequence[int]) -> float:
    """The slow oracle of one replica: every sequence by itself, from event to event, a slot taken as it gets free."""
    step, waiting = decode_step(point), list(reversed(lengths))
    ends: list[tuple[int, int]] = []  # token step at which a running sequence ends, and at which it began
    now, begun, seconds = 0, 0, 0.0
    while ends or waiting:
        while waiting and len(ends) < work.running:
            heapq.heappush(ends, (now + waiting.pop(), now))
            begun += now
        end, start = heapq.heappop(ends)
        age = (now + end) / 2 - begun / (len(ends) + 1)
        running, context = np.array(len(ends) + 1.0), np.array(work.prompt_tokens + age)
        seconds += (end - now) * float(step(running, context))
        now, begun = end, begun - start
    return seconds


@lru_cache(maxsize=1)
def cases() -> tuple[tuple[float, int, int, int, int], ...]:
    """Mean length, limit, samples of a replica, slots, replicas. The first have twice as many samples as slots."""
    rng = random.Random(7)
    rows = [(8000.0, 27000, 256, 128, 1), (1000.0, 27000, 128, 64, 8), (400.0, 16384, 64, 32, 4)]
    for _ in range(13):
        longest = rng.choice([512, 1024, 8192, 27000])
        slots = rng.choice([16, 32, 64, 128])
        replicas = rng.choice([1, 2, 8, 16])
        rows.append((longest * rng.uniform(0.1, 0.9), longest, round(slots * rng.uniform(0.5, 6)), slots, replicas))
    return tuple(rows)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16))
def test_generation_is_within_five_percent_of_a_simulation_of_every_sequence(number: int) -> None:
    mean, longest, share, slots, replicas = cases()[number]
    point = setting("Qwen/Qwen3-1.7B", devices=replicas)
    work = GenerateWork(share * replicas, 8, 512.0, mean, longest, slots)
    rng = np.random.default_rng(number)
    lengths = lognormal(mean, float(longest))
    drawn = []
    for _ in range(max(6, 3000 // (share * replicas))):
        draws = np.interp(rng.random((replicas, share)), lengths.shares, lengths.tokens)
        rows = np.maximum(1, np.ceil(draws)).astype(int)
        drawn.append(max(decode_by_events(point, work, [int(one) for one in row]) for row in rows))
    noise = float(np.std(drawn)) / len(drawn) ** 0.5
    simulated = float(np.mean(drawn))
    predicted = generation(point, work).decode_seconds
    assert abs(predicted - simulated) < 0.05 * simulated + 2.5 * noise


def test_measured_lengths_replace_the_distribution() -> None:
    point = setting()
    work = GenerateWork(256, 8, 256.0, 500.0, 4096, 256)
    even = replace(work, lengths=(500,) * 16)
    heavy = replace(work, lengths=(300,) * 15 + (3500,))
    assert even.distribution.mean == heavy.distribution.mean == 500
    assert generate_seconds(point, even) < generate_seconds(point, heavy)
    assert generation(point, heavy).tail_share > generation(point, even).tail_share


@settings(max_examples=60)
@given(
    st.sampled_from(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2000),
    st.integers(1, 300),
    st.floats(0.05, 0.95),
)
def test_better_hardware_and_less_work_never_take_longer(
    name: str, tp: int, samples: int, running: int, share: float
) -> None:
    point = setting(name, devices=8, tp=tp)
    work = GenerateWork(samples, 1, 300.0, share * 4000, 4000, running)
    seconds = generate_seconds(point, work)
    assert seconds > 0
    for field in ("flops", "memory_bytes_per_s", "link_bytes_per_s"):
        faster = replace(point.cluster, **{field: 1.5 * getattr(point.cluster, field)})
        assert generate_seconds(replace(point, cluster=faster), work) <= seconds * (1 + 1e-9)
    assert generate_seconds(eight_bit(point, cache_bytes=1), work) <= seconds * (1 + 1e-9)
    assert generate_seconds(point, replace(work, prompt_tokens=100.0)) <= seconds
    assert generate_seconds(point, replace(work, mean_new_tokens=share * 3000)) <= seconds * 1.001


def test_a_report_of_a_generation_adds_up() -> None:
    point = setting(devices=8)
    work = GenerateWork(512, 8, 512.0, 900.0, 8192, 64)
    told = generation(point, work)
    assert told.seconds == pytest.approx(generate_seconds(point, work))
    assert told.prefill_seconds + told.decode_seconds <= told.seconds
    assert 0.1 < told.tail_share < 0.9  # 64 sequences a replica: the longest runs alone for long
    assert 1 < told.running <= 64
    assert 0.2 < told.roofline_share < 0.9
    assert told.tokens_per_second == pytest.approx(512 * 900 / told.seconds, rel=0.01)


def test_decoding_one_sequence_reads_the_weights_once_a_token() -> None:
    """8B parameters in bf16 at 85 % of 3.35 TB/s; published speeds of one stream are 100 to 150 tokens/s."""
    assert 100 < 1 / decode_seconds(setting(), 1, 128) < 180


def test_experts_that_lie_whole_on_two_of_four_ranks_are_read_as_such() -> None:
    """With ep 2 in tp 4 a serving engine cuts experts in four; one that keeps them whole reads them on two ranks, where
    half of the rows meet, and its ranks compute as many rows, each its share."""
    cut = setting("Qwen/Qwen3-30B-A3B", devices=4, tp=4)
    cut = replace(cut, layout=replace(cut.layout, ep=2))
    whole = replace(cut, cuts_served_experts=False)
    routed = 48 * 128 * 3 * 768 * 2048  # layers, experts, matrices of each
    read = 2 * routed / 2 / (3.35e12 * 0.85) * (1 + EXPERT_HALF_COLUMNS / 768)
    assert decode_step(whole).expert_read == pytest.approx(read)
    assert (decode_step(cut).group, decode_step(whole).group) == (1.0, 0.5)
    for ep in (1, 2, 4, 8):
        layout = replace(cut.layout, ep=ep)
        both = [decode_step(replace(point, layout=layout)) for point in (cut, whole)]
        assert [step.expert_token for step in both] == [both[0].expert_token] * 2
        assert ep == 2 or [step.group for step in both] == [ep / 4 if ep > 4 else 1.0] * 2


@pytest.mark.parametrize(("ep", "cut", "whole"), [(1, 0, 0), (2, 0, 1), (4, 0, 1), (8, 1, 1)])
def test_rows_go_to_experts_that_lie_whole_on_ranks_of_one_replica_too(ep: int, cut: int, whole: int) -> None:
    """At tp 4: two all-to-all a layer, with ep up to tp of engines alone that cut no experts there."""
    alone = setting("Qwen/Qwen3-30B-A3B", devices=8, tp=4)
    for cuts, sends in ((True, cut), (False, whole)):
        steps = [
            decode_step(replace(alone, layout=replace(alone.layout, ep=n), cuts_served_experts=cuts)) for n in (1, ep)
        ]
        assert (steps[1].fixed > steps[0].fixed, steps[1].sequence > steps[0].sequence) == (sends, sends)


def test_a_step_by_hand() -> None:
    """Llama-3.1-8B on one H100, 16 sequences of 2,000 tokens: 7.5e9 weights outside the embedding, 131 kB a token."""
    weights = 2 * (8_030_261_248 - 128256 * 4096) / (3.35e12 * 0.85)
    cache = 16 * 2000 * 2 * 2 * 32 * 8 * 128 / (3.35e12 * 0.75)
    fixed = 6e-4 + 32 * 1e-5 + 16 * 1e-6
    elementwise = 16 * 32 * 2 * (14 * 4096 + 4 * 14336) / (3.35e12 * 0.85)
    expected = weights + cache + fixed + elementwise
    assert decode_seconds(setting(), 16, 2000) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("ep", [8, 32])
def test_decoding_exchanges_tokens_as_training_does(ep: int) -> None:
    """Seconds of a sequence that exchange adds to a step: there and back in each layer of experts, nodes once each."""
    model = known("Qwen/Qwen3-30B-A3B")
    spread = Layout(DeviceMesh(0, ep), dp=ep, ep=ep)
    point = Setting(model, BF16, spread, cluster("H100-SXM", 8, 4))
    added = decode_step(point).sequence - decode_step(replace(point, layout=Layout(DeviceMesh(0, ep), dp=ep))).sequence
    assert added == pytest.approx(model.layers * layer_costs(point).exchange.token, rel=1e-6)


def test_a_few_tokens_touch_few_experts() -> None:
    point = setting("Qwen/Qwen3-30B-A3B")
    one, many = decode_seconds(point, 1, 100), decode_seconds(point, 128, 100)
    dense = setting("Qwen/Qwen3-32B")
    assert one < decode_seconds(dense, 1, 100) / 4
    assert many > 4 * one


def staged(stages: tuple[tuple[int, ...], ...] = ()) -> Setting:
    """Llama 3.1 8B, whose head is worth 2.4 of 32 layers, on four stages."""
    return replace(setting(devices=4), layout=Layout(DeviceMesh(0, 4), pp=4, stages=stages))


@pytest.mark.parametrize("running", [4, 16, 256])
def test_a_pipeline_takes_a_turn_of_its_slowest_stage_for_each_group_on_its_way(running: int) -> None:
    """Four groups of a quarter of the sequences: four times what the slowest stage takes for one."""
    alone = decode_step(setting())
    fixed = device_kind("H100-SXM").costs.step_seconds
    layers = alone.seconds(running / 4, 1000.0) - fixed  # all layers and the head, on a device that has the whole model
    turn = max(9, 5 + head_layers(known("meta-llama/Llama-3.1-8B"), "lm")) / (32 + 2.4) * layers + fixed
    found = decode_seconds(staged(((9,), (9,), (9,), (5,))), running, 1000.0)
    assert found == pytest.approx(4 * (turn + 1e-5), rel=0.01)
    assert decode_seconds(staged(((8,), (8,), (8,), (8,))), running, 1000.0) > 1.1 * found
    assert decode_seconds(staged(), running, 1000.0) <= found
    halved = decode_seconds(staged(((5, 4), (5, 4), (5, 4), (3, 2))), running, 1000.0)
    assert halved - found == pytest.approx(4 * 1e-5, rel=0.01)  # each group is handed over twice as often


def test_fewer_sequences_than_stages_pass_all_of_them() -> None:
    assert decode_seconds(staged(), 1, 1000.0) == pytest.approx(decode_seconds(staged(), 3, 1000.0))
    assert decode_seconds(staged(), 1, 1000.0) > decode_seconds(setting(), 1, 1000.0)


def test_prefill_passes_are_chunks() -> None:
    point = setting()
    whole, half = (prefill_seconds(point, tokens, 1000.0) for tokens in (1 << 20, 1 << 19))
    assert whole == pytest.approx(2 * half, rel=1e-3)
    assert prefill_seconds(point, 0, 1000.0) == 0
    assert prefill_seconds(eight_bit(point), 1 << 20, 1000.0) < whole


def test_lengths_come_from_the_mean_unless_measured() -> None:
    assert lengths_of(100.0, 1000).mean == pytest.approx(100, rel=0.01)
    assert lengths_of(100.0, 1000, (10, 20, 30)).mean == pytest.approx(20)


@pytest.mark.parametrize("samples", [2, 2048])
def test_responses_of_one_token_need_no_decode_step_where_the_prefill_draws_it(samples: int) -> None:
    point = setting("Qwen/Qwen3-0.6B", 2, "cpu")
    told = generation(point, GenerateWork(samples, 1, 16.0, 1.0, 1, 128))
    assert told.decode_seconds == 0 < told.prefill_seconds <= told.seconds < math.inf
