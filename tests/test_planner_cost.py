"""Predicted seconds: against published speeds and against common sense."""

import msgspec
import pytest

from realgraph.graphs.spec import ModelRole
from realgraph.planner.cost import Setting
from realgraph.planner.cost_inference import inference_seconds
from realgraph.planner.cost_train import TrainWork, train_seconds
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.model_spec import ModelSpec
from tests.planner_cases import cluster, known

replace = msgspec.structs.replace
BF16 = ModelRole(dtype="bfloat16")


def setting(name: str = "meta-llama/Llama-3.1-8B", devices: int = 1, kind: str = "H100-SXM") -> Setting:
    return Setting(known(name), BF16, Layout(DeviceMesh(0, devices), dp=devices), cluster(kind, devices))


# Narayanan et al. 2021 (arXiv:2104.04473), table 1: hidden, layers, heads, tp, pp, GPUs, sequences, TFLOP/s a GPU.
MEGATRON = [
    (2304, 24, 24, 1, 1, 32, 512, 137),
    (3072, 30, 32, 2, 1, 64, 512, 138),
    (4096, 36, 32, 4, 1, 128, 512, 142),
    (6144, 40, 48, 8, 1, 256, 1024, 135),
    (8192, 48, 64, 8, 2, 512, 1536, 138),
    (10240, 60, 80, 8, 4, 1024, 1792, 140),
]


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"hidden{row[0]}")
def test_training_speed_is_near_what_megatron_published(row: tuple[int, ...]) -> None:
    hidden, layers, heads, tp, pp, gpus, batch, teraflops = row
    length, vocab = 2048, 51200
    model = ModelSpec("llama", hidden, layers, heads, heads, hidden // heads, 8 * hidden // 3, vocab, True, length)
    layout = Layout(DeviceMesh(0, gpus), dp=gpus // tp // pp, tp=tp, pp=pp)
    role = ModelRole(dtype="bfloat16", gradient_checkpointing=True)
    machine = cluster("A100-80", 8, gpus // 8)
    seconds = train_seconds(Setting(model, role, layout, machine), TrainWork(batch * length, length, length))
    # their equation 3: operations of a batch, checkpointed forward included
    work = 96 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    # predictions are 2 to 34 % shorter, most at small widths: their attention of 2021 was not yet one fused kernel
    assert seconds == pytest.approx(work / (teraflops * 1e12 * gpus), rel=0.35)


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
