"""Sliding windows: which layers transformers gives one, the tokens that a query sees under it, and what that costs."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import TrainWork, train_seconds
from realgraph.planner.costs.generate.decode import decode_seconds
from realgraph.planner.costs.generate.generate import GenerateWork, generate_seconds, prefill_seconds
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.lengths import lognormal, measured
from realgraph.planner.costs.memory.memory import kv_bytes_per_token
from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import fewer_windowed, mean_context, mean_seen
from realgraph.planner.inputs.model_configs import load_model_spec
from realgraph.planner.inputs.model_spec import ModelSpec, spec_from_config
from realgraph.planner.inputs.windows import SlidingWindow
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.stages import layer_ranges
from tests.planner_cases import cluster, known

BF16 = ModelRole(trainable=True, dtype="bfloat16")
SHAPE = {
    **{"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"intermediate_size": 96, "vocab_size": 50, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TYPES = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention", "full_attention"]
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("llama", "gemma", "mistral", "mixtral", "gpt_oss", "gemma2", "gemma3_text", "qwen2")),
    *((kind, {"sliding_window": 9}) for kind in ("mistral", "mixtral", "gpt_oss", "gemma2", "gemma3_text", "qwen3")),
    *((kind, {"sliding_window": None}) for kind in ("mistral", "mixtral")),
    *((kind, {"layer_types": TYPES}) for kind in ("gpt_oss", "gemma2", "gemma3_text")),
    *((kind, {"use_sliding_window": True}) for kind in ("qwen2", "qwen3")),
    *((kind, {"use_sliding_window": True, "max_window_layers": 3}) for kind in ("qwen2", "qwen3")),
    ("qwen3", {"use_sliding_window": True, "layer_types": TYPES, "sliding_window": 5}),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", {**EXPERTS, "use_sliding_window": True}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
]


def built_windows(kind: str, network: torch.nn.Module, config: Any) -> dict[int, int]:
    """Windows of the layers that have one, as transformers' modules hold them; Mistral's and Mixtral's read theirs of
    the configuration."""
    found = {}
    for layer in network.model.layers:  # type: ignore[union-attr]
        attention = layer.self_attn
        window = config.sliding_window if kind in ("mistral", "mixtral") else getattr(attention, "sliding_window", None)
        if window is not None:
            found[attention.layer_idx] = window
    return found


@pytest.mark.parametrize(("kind", "extra"), CONFIGS, ids=str)
def test_windows_are_those_that_transformers_builds(kind: str, extra: dict[str, Any], tmp_path: Any) -> None:
    config = AutoConfig.for_model(kind, **{**SHAPE, **extra})
    with torch.device("meta"):
        built = built_windows(kind, AutoModelForCausalLM.from_config(config), config)
    config.save_pretrained(tmp_path)
    given_fields = {"model_type": kind, **SHAPE, **extra}  # as a Hub's older files have them
    for spec in (load_model_spec(str(tmp_path), Where()), spec_from_config(given_fields, Where())):
        window = spec.window or SlidingWindow(1, ())
        assert dict.fromkeys(window.layers, window.tokens) == built


@pytest.mark.parametrize("seed", range(10))
def test_tokens_seen_are_those_of_all_query_positions(seed: int) -> None:
    """Up to the half token that a count of whole tokens has over one of continuous positions."""
    rng = random.Random(seed)
    prompt, window = rng.randint(0, 1000), rng.choice([1, 37, 128, 1000, 1700, 5000])
    new = [rng.randint(1, 3000) for _ in range(300)]
    seen = [sum(min(t + 1, window) for t in range(prompt + n)) for n in new]
    tokens = sum(prompt + n for n in new)
    assert mean_context(prompt, measured(new), window) == pytest.approx(sum(seen) / tokens, rel=2e-3, abs=0.5)
    for n, one in zip(new[:20], seen, strict=False):
        assert mean_seen(prompt + n, window) == pytest.approx(one / (prompt + n), abs=0.5)


@pytest.mark.parametrize("mean", [300.0, 4000.0])
def test_a_window_of_drawn_lengths_is_that_of_the_distribution(mean: float) -> None:
    lengths = lognormal(mean, 32768)
    drawn = [lengths.quantile((i + 0.5) / 20000) for i in range(20000)]
    for window in (64.0, 512.0, 8192.0, 1e6):
        seen = sum(mean_seen(100 + n, window) * (100 + n) for n in drawn) / sum(100 + n for n in drawn)
        assert mean_context(100, lengths, window) == pytest.approx(seen, rel=5e-3)


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    model = known(draw(st.sampled_from(("openai/gpt-oss-120b", "google/gemma-2-27b", "mistralai/Mistral-7B-v0.1"))))
    pp, tp, dp = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 4))), draw(st.sampled_from((1, 4)))
    layers = draw(st.sets(st.integers(0, model.layers - 1), min_size=1))
    model = replace(model, window=SlidingWindow(1, tuple(sorted(layers))))
    devices = pp * tp * dp
    layout = Layout(DeviceMesh(0, devices), dp=dp, tp=tp, pp=pp)
    return Setting(model, BF16, layout, cluster("H100-SXM", 8, -(-devices // 8)))


def seconds(setting: Setting, window: int | None) -> tuple[float, ...]:
    """Seconds of a train, an inference and a generate call, a prefill and a decode step, of up to 8,292 tokens."""
    layers = setting.model.window.layers if setting.model.window is not None else ()
    model = replace(setting.model, window=None if window is None else SlidingWindow(window, layers))
    setting = replace(setting, model=model)
    train = TrainWork(1 << 20, 2100.0, 16384, prompt_tokens=100.0, longest_tokens=8292)
    generate = GenerateWork(512, 8, 100.0, 2000.0, 8192, 64)
    return (
        train_seconds(setting, train),
        inference_seconds(setting, train),
        generate_seconds(setting, generate),
        prefill_seconds(setting, 1 << 16, 8000.0),
        decode_seconds(setting, 64, 8000.0),
    )


@settings(max_examples=60)
@given(settings_of(), st.integers(1, 8300), st.integers(1, 8300))
def test_seconds_never_grow_with_a_smaller_window(setting: Setting, one: int, other: int) -> None:
    small, large = seconds(setting, min(one, other)), seconds(setting, max(one, other))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(small, large, strict=True))


@settings(max_examples=30)
@given(settings_of())
def test_a_window_no_shorter_than_the_context_changes_nothing(setting: Setting) -> None:
    assert seconds(setting, 8292) == pytest.approx(seconds(setting, None), rel=1e-12)


@settings(max_examples=30)
@given(settings_of())
def test_engines_that_mask_gain_nothing(setting: Setting) -> None:
    masked = replace(setting, masks_windows=True)
    assert seconds(masked, 64) == pytest.approx(seconds(masked, None), rel=1e-12)
    on_cpu = replace(setting, cluster=cluster("cpu", 8, setting.cluster.nodes))
    assert seconds(on_cpu, 64) == pytest.approx(seconds(on_cpu, None), rel=1e-12)


def windowed(name: str, layers: tuple[int, ...]) -> ModelSpec:
    return replace(known(name), window=SlidingWindow(128, layers))


@pytest.mark.parametrize("pp", [2, 4])
def test_the_fullest_stage_is_the_one_without_windows(pp: int) -> None:
    """Windows on the first half of the layers save a pipeline next to nothing: the last stage is the fullest."""
    half = tuple(range(18))
    stages = ((36 // pp,),) * pp
    first, second = windowed("openai/gpt-oss-120b", half), windowed("openai/gpt-oss-120b", tuple(range(0, 36, 2)))
    short = fewer_windowed(first, stages)
    assert sum(short) == pytest.approx(0)
    for less, chunks in zip(short, layer_ranges(stages), strict=True):
        assert less == pytest.approx(sum(0.5 - (layer in half) for chunk in chunks for layer in chunk))
    layout = Layout(DeviceMesh(0, pp), pp=pp, stages=stages)
    work = TrainWork(1 << 24, 131072.0, 131072)
    point = Setting(replace(first, window=None), BF16, layout, cluster())
    none, uneven, even = (
        inference_seconds(replace(point, model=model), work) for model in (point.model, first, second)
    )
    assert even < uneven < none
    position = layer_costs(point).attention.position
    hidden = 131072 * (mean_seen(131072.0) - mean_seen(131072.0, 128))  # of one micro-batch in a windowed layer
    count, filled = 128, (pp - 1) * 18 / pp  # layers with windows of the stages that fill the pipeline
    assert none - uneven == pytest.approx(hidden * position * filled, rel=1e-6)
    assert none - even > 0.8 * hidden * position * (count * 18 / pp + filled)


def test_caches_hold_all_tokens_whatever_the_window() -> None:
    model = known("openai/gpt-oss-20b")
    assert kv_bytes_per_token(model, 2) == kv_bytes_per_token(replace(model, window=None), 2)


def test_half_the_layers_of_gpt_oss_read_a_window() -> None:
    """A long context costs a decode step what half of its layers read, and 128 tokens of the others."""
    point = Setting(known("openai/gpt-oss-20b"), BF16, Layout(DeviceMesh(0, 1)), cluster())
    plain = replace(point, model=replace(point.model, window=None))
    base, long = decode_seconds(plain, 64, 128), decode_seconds(plain, 64, 32768)
    assert decode_seconds(point, 64, 128) == base
    assert decode_seconds(point, 64, 32768) - base == pytest.approx((long - base) / 2, rel=1e-9)
    assert math.isfinite(long)
