"""Predicted seconds: against published speeds and against common sense."""

import msgspec
import pytest

from benchmarks.published_backends import MEGATRON_2022
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import Recompute, TrainWork, train_seconds
from realgraph.planner.costs.layer import layer_costs
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, known

replace = msgspec.structs.replace
BF16 = ModelRole(dtype="bfloat16")


def setting(name: str = "meta-llama/Llama-3.1-8B", devices: int = 1, kind: str = "H100-SXM") -> Setting:
    return Setting(known(name), BF16, Layout(DeviceMesh(0, devices), dp=devices), cluster(kind, devices))


# Narayanan et al. 2021 (arXiv:2104.04473), table 1: hidden, layers, heads, tp, pp, GPUs, sequences, TFLOP/s a GPU, and
# the sequences of a micro-batch with which the model is fastest.
MEGATRON = [
    (2304, 24, 24, 1, 1, 32, 512, 137, 16),
    (3072, 30, 32, 2, 1, 64, 512, 138, 8),
    (4096, 36, 32, 4, 1, 128, 512, 142, 4),
    (6144, 40, 48, 8, 1, 256, 1024, 135, 4),
    (8192, 48, 64, 8, 2, 512, 1536, 138, 4),
    (10240, 60, 80, 8, 4, 1024, 1792, 140, 2),
    (12288, 80, 96, 8, 8, 1536, 2304, 148, 2),
    (16384, 96, 128, 8, 16, 1920, 2160, 155, 2),
    (25600, 128, 160, 8, 64, 3072, 3072, 163, 2),
]
LENGTH, VOCAB = 2048, 51200


def gpt(hidden: int, layers: int, heads: int) -> ModelSpec:
    """A model of GPT-3's kind."""
    return ModelSpec(
        "llama", hidden, layers, heads, heads, hidden // heads, 4 * hidden, VOCAB, True, LENGTH, mlp_matrices=2
    )


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"hidden{row[0]}")
def test_training_speed_is_near_what_megatron_published(row: tuple[int, ...]) -> None:
    hidden, layers, heads, tp, pp, gpus, batch, teraflops, micro = row
    layout = Layout(DeviceMesh(0, gpus), dp=gpus // tp // pp, tp=tp, pp=pp)
    work = TrainWork(
        batch * LENGTH,
        LENGTH,
        micro * LENGTH,
        recompute="full",
        schedule="interleaved" if pp > 1 else "1f1b",
    )
    machine = cluster("A100-80", 8, gpus // 8)
    point = Setting(gpt(hidden, layers, heads), BF16, layout, machine, backend=MEGATRON_2022)
    # their equation 3: operations of a batch, checkpointed forward included
    once = 96 * batch * LENGTH * layers * hidden**2 * (1 + LENGTH / (6 * hidden) + VOCAB / (16 * layers * hidden))
    assert once / train_seconds(point, work) / gpus / 1e12 == pytest.approx(teraflops, rel=0.12)


# Korthikanti et al. 2022 (arXiv:2205.05198), table 5: hidden, layers, heads, pp, sequences, seconds of an iteration
# with full recomputation, and with sequence parallelism and selective recomputation. tp 8, one sequence a micro-batch
KORTHIKANTI = [
    (12288, 96, 96, 8, 64, 18.13, 13.75),
    (20480, 105, 128, 35, 280, 49.05, 37.83),
    (25600, 128, 160, 64, 512, 94.42, 71.49),
]


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: f"hidden{row[0]}")
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_costs_what_its_paper_measured(row: tuple[float, ...], recompute: Recompute) -> None:
    hidden, layers, heads, pp, batch = (int(value) for value in row[:5])
    machine = cluster("A100-80", 8, pp)
    layout = Layout(DeviceMesh(0, 8 * pp), tp=8, pp=pp)
    engine = replace(MEGATRON_2022, sequence_parallel=recompute == "selective")
    work = TrainWork(batch * LENGTH, LENGTH, LENGTH, recompute=recompute, schedule="interleaved", chunks=3)
    seconds = train_seconds(Setting(gpt(hidden, layers, heads), BF16, layout, machine, backend=engine), work)
    assert seconds == pytest.approx(row[5] if recompute == "full" else row[6], rel=0.12)


@pytest.mark.parametrize(("gpus", "teraflops"), [(8192, 430), (16384, 400)])
def test_training_llama_405b_is_near_its_paper(gpus: int, teraflops: float) -> None:
    """arXiv:2407.21783, table 4: tp 8, pp 16, 2,048 sequences of 8,192 tokens, bfloat16 on H100."""
    model, batch, length = known("meta-llama/Llama-3.1-405B"), 2048, 8192
    layout = Layout(DeviceMesh(0, gpus), dp=gpus // 128, tp=8, pp=16)
    point = Setting(model, BF16, layout, cluster("H100-SXM", 8, gpus // 8))
    seconds = train_seconds(point, TrainWork(batch * length, length, length, schedule="interleaved", chunks=8))
    once = (6 * model.n_params() + 6 * model.layers * model.hidden * length) * batch * length
    assert once / seconds / gpus / 1e12 == pytest.approx(teraflops, rel=0.15)


def test_one_layer_of_8b_by_hand() -> None:
    """8,192 tokens of Llama 3.1 8B on one H100: 218,103,808 weights of a layer, at 0.72 x 0.9 of 989 TFLOP/s."""
    costs = layer_costs(setting())
    rows = 8192 + 250  # with those that half-empty waves cost
    projections, mlp = 2 * 41_943_040, 2 * 176_160_768
    rate = 0.72 * 0.9 * 989e12 * 4096 / (4096 + 128)  # of products whose smaller side is 4,096
    assert costs.products.at(8192, 0) == pytest.approx(rows * (projections + mlp) / rate, rel=1e-6)
    scores = 4 * 32 * 128 * 8192 * 4096  # each token sees 4,096 others
    assert costs.attention.at(8192, 4096) == pytest.approx(scores / (989e12 * 0.54 * 0.9), rel=1e-6)
    assert costs.traffic.at(8192, 0) == pytest.approx(8192 * 2 * (14 * 4096 + 4 * 14336) / (3.35e12 * 0.85), rel=1e-6)
    assert costs.head.at(8192, 0) > rows * 2 * 128256 * 4096 / rate


def test_faster_hardware_and_smaller_work_never_take_longer() -> None:
    base, work = setting(devices=8), TrainWork(1 << 20, 1024, 8192)
    seconds = train_seconds(base, work)
    faster = replace(base.cluster, flops=2 * base.cluster.flops)
    assert train_seconds(replace(base, cluster=faster), work) < seconds
    assert train_seconds(base, replace(work, tokens=1 << 19)) < seconds
    assert train_seconds(base, replace(work, optimizer_steps=4)) > seconds
    assert train_seconds(base, replace(work, epochs=2)) == pytest.approx(2 * seconds)
    assert inference_seconds(base, work) < seconds / 2
    light = replace(base, role=ModelRole(dtype="bfloat16", gradient_checkpointing=True))
    assert train_seconds(light, work) > seconds
    slow_links = replace(base.cluster, link_bytes_per_s=1e9)
    for sharding in ("replicated", "fsdp"):
        layout = replace(base.layout, sharding=sharding)
        near, far = replace(base, layout=layout), replace(base, layout=layout, cluster=slow_links)
        assert train_seconds(far, work) > train_seconds(near, work)


def test_a_tiny_model_on_a_cpu_takes_what_was_measured() -> None:
    """Qwen3 of 0.8M parameters, fp32, one core: packed training of 10,000 tokens/s."""
    tiny = ModelSpec("qwen3", 128, 4, 4, 2, 32, 384, 512, True, 1024, qk_norm=True)
    point = Setting(tiny, ModelRole(), Layout(DeviceMesh(0, 1)), cluster("cpu", 1))
    assert 4_000 < 8192 / train_seconds(point, TrainWork(8192, 47, 4096)) < 25_000
