"""Predicted seconds of generation: against a slow simulation, and against common sense."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.spec import ModelRole
from realgraph.planner.cost import Setting
from realgraph.planner.cost_forward import forward_seconds
from realgraph.planner.cost_generate import GenerateWork, decode_seconds, generate_seconds, length_quantile
from realgraph.planner.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

BF16 = ModelRole(dtype="bfloat16")


def setting(name: str = "meta-llama/Llama-3.1-8B", devices: int = 1, kind: str = "H100-SXM") -> Setting:
    return Setting(known(name), BF16, Layout(DeviceMesh(0, devices), dp=devices), cluster(kind, devices))


def decode_by_tokens(point: Setting, work: GenerateWork, lengths: list[int]) -> float:
    """One decode step after the other, one slot after the other: the slow oracle of a device's share."""
    waiting, seconds = list(lengths), 0.0
    running: list[list[int]] = []  # age and length
    while waiting or running:
        while waiting and len(running) < work.running:
            running.append([0, waiting.pop(0)])
        context = work.prompt_tokens + sum(age for age, _ in running) / len(running)
        seconds += decode_seconds(point, len(running), context)
        running = [[age + 1, length] for age, length in running if age + 1 < length]
    prompts = math.ceil(work.samples / work.samples_per_group) * work.prompt_tokens
    return seconds + forward_seconds(point, prompts, work.prompt_tokens / 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["H100-SXM", "cpu"])
def test_generation_is_near_a_simulation_token_by_token(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    longest = rng.choice([64, 256, 1024])
    samples, mean = rng.choice([8, 64, 300]), longest / rng.choice([2, 4])
    work = GenerateWork(samples, 4, rng.choice([16, 512]), mean, longest, rng.choice([8, 32, 128]))
    point = setting("Qwen/Qwen3-0.6B", kind=kind)
    shares = [(i + 0.5) / samples for i in range(samples)]
    lengths = [max(1, round(length_quantile(share, mean, longest))) for share in shares]
    rng.shuffle(lengths)
    assert generate_seconds(point, work) == pytest.approx(decode_by_tokens(point, work, lengths), rel=0.25)


@settings(deadline=None)
@given(st.floats(1, 4000), st.integers(1, 4096))
def test_lengths_have_their_mean_and_stay_within_the_longest(mean: float, longest: int) -> None:
    mean = min(mean, float(longest))
    lengths = [length_quantile((i + 0.5) / 2000, mean, longest) for i in range(2000)]
    assert lengths == sorted(lengths)
    assert 0 < lengths[0] <= lengths[-1] <= longest
    assert math.fsum(lengths) / 2000 == pytest.approx(mean, rel=0.03)


def test_decoding_one_sequence_reads_the_weights_once_a_token() -> None:
    """8B parameters in bf16 at 85 % of 3.35 TB/s; published speeds of one stream are 100 to 150 tokens/s."""
    assert 100 < 1 / decode_seconds(setting(), 1, 128) < 180
