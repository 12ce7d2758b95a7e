"""Rows of published measurements in any shape: predicted, or left out with a reason, never an exception."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks import published_rl, published_train
from benchmarks.cost_model import calibrated, ranked, targets
from benchmarks.published import Row

BLANK = Row(*[""] * len(Row.__struct_fields__))


def row(system: str, model: str, gpu: str, **fields: str) -> Row:
    return replace(BLANK, source="s", system=system, model=model, gpu=gpu, **fields)


def axes(n_gpus: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> dict[str, str]:
    dp = n_gpus // (tp * pp * cp)
    numbers = {"n_gpus": n_gpus, "tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep}
    return {name: str(value) for name, value in numbers.items()}


STEP = {"metric": "step_time", "unit": "s", "value": "100"}
SPEED = {"metric": "throughput_per_gpu", "unit": "tokens/s/gpu", "value": "5000"}
TRAIN = [
    row(
        "Megatron-DeepSpeed (BLOOM)",
        "GPT-176B",
        "A100-80GB",
        **axes(384, 4, 12),
        **STEP,
        phase="train",
        params_b="176",
        seq_len="2048",
        global_batch="2048",
        micro_batch="2",
        notes="act-ckpt, ZeRO-1; heads 112; hidden 14336 layers 70; 02-28",
    ),
    row(
        "llm-foundry (Composer FSDP)",
        "MPT-7b",
        "H100-80GB",
        **axes(8),
        **SPEED,
        phase="train",
        seq_len="2048",
        global_batch="48",
        micro_batch="6",
        notes="FSDP FULL_SHARD; amp_bf16; act-ckpt=False; grad-accum 1",
    ),
    row(
        "torchtitan",
        "Llama-3.1-405B",
        "H100-96GB-HBM2e-500W",
        **axes(512, 8, 16),
        **SPEED,
        phase="train",
        seq_len="8192",
        micro_batch="2",
        notes="float8; asyncTP; full-ac; VP=2",
    ),
    row(
        "prime-rl",
        "Qwen/Qwen3-30B-A3B",
        "B200",
        **axes(8, cp=2, ep=8),
        phase="train",
        metric="peak_memory",
        unit="GiB",
        value="60",
        seq_len="16384",
        micro_batch="1",
        notes="RL trainer only; LoRA r=16; AC=Offload; FSDP2; micro_batches per step=2",
    ),
    row(
        "Megatron-Bridge/Megatron-Core",
        "DeepSeekV3",
        "GB200",
        **axes(256, 1, 4, ep=64),
        **SPEED,
        phase="train",
        seq_len="4096",
        global_batch="2048",
        micro_batch="1",
        notes="FP8; VP=4; FSDP=1",
    ),
]
RL = [
    row(
        "TensorRT-LLM v0.14",
        "LLaMA v3.1 70B",
        "H100-80GB-SXM",
        n_gpus="4",
        tp="4",
        phase="generate",
        metric="output_throughput_total",
        unit="tokens/s",
        value="5000",
        notes="FP8; ISL 1000 OSL 1000",
    ),
    row(
        "NeMo-RL v0.5",
        "DeepSeek V3",
        "GB200-NVL72",
        **axes(256, 1, 8, ep=16),
        **STEP,
        phase="e2e",
        seq_len="1536",
        global_batch="512",
        notes="GRPO 1-step Off; gen TP32 PP1; avg gen len 697; FP8",
    ),
    row(
        "verl",
        "Qwen2.5-Math-7B",
        "H20-96GB",
        **STEP,
        n_gpus="64",
        phase="e2e",
        seq_len="28672",
        notes="FSDP2+vLLM; fully async 32:32 (rollout:train)",
    ),
    row(
        "verl",
        "Qwen3-30B-A3B",
        "H20-96GB",
        n_gpus="32",
        phase="weight_sync",
        metric="sync_time",
        unit="s",
        value="15",
        notes="trainer ranks 16 -> rollout ranks 16; checkpoint-engine=on",
    ),
    row(
        "AReaL v0.3",
        "DeepSeek-R1-Distill-Qwen-7B",
        "H800-80GB",
        n_gpus="192",
        phase="e2e",
        metric="hours_for_1000_ppo_steps",
        unit="h",
        value="25",
        notes="async; 24 nodes x 8",
    ),
    row(
        "OpenRLHF (2024-25)",
        "LLaMA2-34B",
        "A800-80GB",
        n_gpus="32",
        phase="e2e",
        metric="ppo_epoch_time_1024_prompts",
        unit="s",
        value="1500",
        notes="ZeRO-3",
    ),
    row(
        "DeepSpeed-Chat",
        "LLaMA2-13B",
        "A800-80GB",
        n_gpus="32",
        phase="e2e",
        metric="ppo_epoch_time_1024_prompts",
        unit="s",
        value="1500",
        notes="ZeRO-3",
    ),
]
NUMBERS = ["", "n/a", "1/2", "nan", "inf", "-4", "0", "0.5", "1", "2", "3", "5", "7", "8", "24", "64", "1536", "100000"]
WORDS = {
    "model": [
        "Llama-3-8B",
        "Llama 2 70B",
        "LLaMA2-70B",
        "GPT-1008B",
        "GPT-999B",
        "MPT-125m",
        "MPT-9b",
        "Qwen/Qwen3-235B-A22B",
        "Kimi-K2",
        "Mixtral 8x7B",
        "gpt-oss-20b",
        "Moonlight-16B",
        "DeepSeek-R1-Distill-Qwen-32B",
        "Nemotron-H",
        "",
    ],
    "gpu": ["A100-40GB", "H100-80GB", "H100-PCIe", "GB200-NVL72", "B300", "RTX-A6000", "MI300X", "TPU-v5p", "", "H20"],
    "unit": ["s", "ms", "h", "tokens/s", "samples/s/gpu", "seq/s", "%", ""],
    "metric": ["step_time", "throughput_total", "hw_tflops_per_gpu", "oom", "peak_memory", "generate_time", "mfu", ""],
    "notes": [
        "",
        "SUSPECT",
        "LoRA r=8",
        "sync",
        "async",
        "VP=0",
        "hidden 0 layers 0",
        "heads 0; hidden 7000 layers 9",
        "ISL 0 OSL 0",
        "ISL 100000 OSL 100000",
        "gen TP0; avg gen len 0",
        "gen TP64 PP1; avg gen len 900000; 1-step Off",
        "fully async 0:0 (rollout:train)",
        "one-step-off async (4 gen+12 train GPUs)",
        "rollout ranks 0",
        "checkpoint-engine=off; full broadcast; param offload on",
        "micro_batches per step=0; full recompute; full-ac; float8",
    ],
    "phase": ["train", "generate", "inference", "e2e", "weight_sync", "other"],
}
COUNTS = ["n_gpus", "tp", "pp", "dp", "cp", "ep", "seq_len", "global_batch", "micro_batch", "params_b", "value"]


@st.composite
def mutated(draw: st.DrawFn, bases: list[Row]) -> Row:
    """A real row with up to five of its columns changed."""
    changed = {}
    for name in draw(st.lists(st.sampled_from([*COUNTS, *WORDS]), max_size=5, unique=True)):
        changed[name] = draw(st.sampled_from(WORDS.get(name, NUMBERS)))
    return replace(draw(st.sampled_from(bases)), **changed)


def answered(rows: list[Row]) -> None:
    """Every row of a known phase has a finite prediction or a reason."""
    plain = [*published_train.predictions(rows), *published_rl.predictions(rows)]
    reasons = dict([*published_train.unpredicted(rows), *published_rl.unpredicted(rows)])
    predicted = {one.row for one in plain if one.phase != "fits" or one.row.metric == "oom"}
    for one in rows:
        assert one in predicted or reasons.get(one) or one.phase not in (*published_rl.PHASES, "train"), one
    for found in plain:
        assert math.isfinite(found.predicted) and (found.predicted > 0 or found.phase == "fits"), found
        assert math.isfinite(found.measured) and (found.measured > 0 or found.phase == "fits"), found
    if plain:
        pairs = list(zip(plain, calibrated(plain), strict=True))
        list(targets(pairs, ranked(plain)))


@pytest.mark.slow
@settings(max_examples=300)
@given(mutated(TRAIN + RL))
def test_a_row_in_any_shape_is_predicted_or_has_a_reason(one: Row) -> None:
    answered([one])


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(mutated(TRAIN + RL), min_size=2, max_size=12))
def test_rows_in_any_shape_are_calibrated_and_compared_together(rows: list[Row]) -> None:
    answered(rows)


def test_whole_rows_are_predicted() -> None:
    rows = TRAIN + RL
    plain = [*published_train.predictions(rows), *published_rl.predictions(rows)]
    assert {one.row for one in plain} == set(rows)
