"""The comparison with published measurements: shapes, statistics, calibration and what is compared."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import cost_model
from benchmarks.cost_model import calibrated, ranked, shared_factor, spearman, system_of, targets
from benchmarks.published import Prediction, Row, read_rows
from benchmarks.published_adapters import adapted_train_seconds
from benchmarks.published_assumed import hybrid_engine, lengths_with_cut, mean_with_cut
from benchmarks.published_backends import DEEPSPEED_CHAT
from benchmarks.published_rl import predictions as rl_predictions
from benchmarks.published_shapes import (
    DEEPSEEK_V3,
    GLM_AIR,
    GPT_OSS,
    KIMI_K2,
    MIXTRAL,
    MOONLIGHT,
    cluster_of,
    gpt,
    model_of,
)
from benchmarks.published_steps import layout_of, overheads, written_seconds
from benchmarks.published_train import predictions, unpredicted
from benchmarks.static_batches import static_generate_seconds
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.inference import inference_seconds
from realgraph.planner.costs.compute.train import TrainWork
from realgraph.planner.costs.generate.generate import GenerateWork
from realgraph.planner.costs.lengths import lengths_of
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec
from tests.planner_cases import cluster, known


def row(**fields: str) -> Row:
    blank = dict.fromkeys(Row.__struct_fields__, "")
    common = {"source": "s", "system": "Megatron-LM", "model": "GPT-3 175B", "params_b": "175", "gpu": "A100-80GB"}
    axes = {"n_gpus": "1024", "tp": "8", "pp": "16", "dp": "8", "seq_len": "2048", "global_batch": "1536"}
    measured = {"micro_batch": "1", "phase": "train", "metric": "step_time", "value": "32", "unit": "s"}
    return Row(**{**blank, **common, **axes, **measured, **fields})


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        (DEEPSEEK_V3, 671, 37),
        (KIMI_K2, 1026, 32),
        (MOONLIGHT, 16, 2.9),
        (GPT_OSS, 116.8, 5.1),
        (GLM_AIR, 106.9, 12),
        (MIXTRAL, 46.7, 12.9),
    ],
)
def test_shapes_have_their_published_number_of_parameters(model: ModelSpec, billions: float, active: float) -> None:
    assert model.n_params() / 1e9 == pytest.approx(billions, rel=0.01)
    embedding = (1 if model.tied else 2) * model.vocab * model.hidden
    low, high = model.active_params() / 1e9, (model.active_params() + embedding) / 1e9
    assert 0.95 * low <= active <= 1.08 * high


@pytest.mark.parametrize(
    ("name", "notes", "billions"),
    [
        ("LLAMA3.1_405B", "", 405.9),
        ("Llama-3-8B", "", 8.03),
        ("MPT-7b", "", 6.65),
        ("GPT-181B", "250k/150k vocab; heads n/a; hidden 14336 layers 72", 181.2),
        ("Qwen3_235B_a22B", "", 235.1),
        ("Falcon-180B", "", 178.6),
        ("GPT-J 6B", "", 6.05),
        ("OPT-66B", "", 65.7),
        ("Nemotron4 340B", "", 341),
        ("Mistral-Large", "", 122.6),
        ("GLM-4.5", "", 355),
        ("LLAMA4 Scout", "", 107.8),
        ("LLAMA4-e128", "", 400.7),
        ("DeepSeek-V2", "", 235.7),
        ("DeepSeek-V2-Lite", "", 15.7),
        ("Qwen2-57B-A14B", "", 57.4),
    ],
)
def test_names_and_notes_tell_shapes(name: str, notes: str, billions: float) -> None:
    found = model_of(row(model=name, notes=notes, params_b=str(billions)))
    assert found is not None
    assert found.n_params() / 1e9 == pytest.approx(billions, rel=0.01)


def test_machines_are_whole_nodes_of_a_known_kind() -> None:
    machine = cluster_of(row(gpu="H100-96GB-HBM2e-500W", n_gpus="256"))
    assert machine is not None
    assert (machine.kind, machine.nodes, machine.memory_bytes) == ("H100-SXM", 32, 96 * 10**9)
    assert machine.flops < 989e12
    assert cluster_of(row(gpu="TPU-v5p")) is None


def test_a_configuration_is_one_prediction_whatever_its_units() -> None:
    rows = [
        row(notes="full recompute, fp16", source="README (2022 snapshot)"),
        row(notes="full recompute, fp16", source="README (2022 snapshot)", metric="hw_tflops_per_gpu", value="138"),
        row(model="Nemotron-H", gpu="H100-80GB"),
        row(gpu="TPU-v5p"),
    ]
    found = list(predictions(rows))
    assert [one.phase for one in found] == ["train", "fits"]
    assert found[0].predicted == pytest.approx(32, rel=0.12)
    reasons = [reason for _, reason in unpredicted(rows)]
    assert reasons == [
        "the same measurement in another unit",
        "no shape known of Nemotron-H",
        "no machine known of 1024 x TPU-v5p",
    ]


def test_rank_correlation_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert spearman([1, 1, 2, 2], [1, 1, 2, 2]) == pytest.approx(1)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def made(system: str, measured: float, predicted: float, unit: str = "s") -> Prediction:
    return Prediction(row(system=system, unit=unit), "train", "g", measured, predicted, backend="b")


def test_a_factor_comes_from_other_systems_only() -> None:
    slow = [made("A", 20.0, 10.0 + i / 1e6) for i in range(50)] + [made("B", 20.0, 10.0) for _ in range(50)]
    lone = made("C v1.2", 10.0, 10.0)
    out = calibrated([*slow, lone, made("C v1.3", 1.0, 10.0)])
    assert out[-2].predicted > 10  # A and B say that this engine is slower than predicted; the other C says nothing
    assert out[-2].predicted == pytest.approx(10 * shared_factor([[math.log(2)] * 50] * 2), rel=1e-3)
    rates = calibrated([*slow, made("C", 10.0, 10.0, "tokens/s")])
    assert rates[-1].predicted < 10
    assert system_of(lone.row) == "C"


def test_what_is_assumed_teaches_no_factor_but_counts() -> None:
    guessed = [replace(made("A", 20.0, 10.0), assumed="lengths") for _ in range(50)]
    assert [one.predicted for one in calibrated([*guessed, made("C", 10.0, 10.0)])] == [10.0] * 51
    claims = list(targets([(one, one) for one in guessed], {}))
    assert claims[0].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "nodes", "asked", "tp", "hours"),
    [
        ((5120, 40, 40), 1, 16, 2, 9.0),
        ((5120, 40, 40), 8, 16, 2, 1.25),
        ((9216, 64, 72), 1, 4, 8, 50.4),
        ((9216, 64, 72), 8, 4, 8, 7.5),
    ],
)
def test_deepspeed_chat_is_near_its_own_post(
    shape: tuple[int, int, int], nodes: int, asked: int, tp: int, hours: float
) -> None:
    """OPT-13B and OPT-66B, 131.9 thousand prompts and answers of 256 tokens, adapters of rank 128 (in training)."""
    model, machine, devices = gpt(*shape, 50272), cluster("A100-80", 8, nodes), 8 * nodes
    work = GenerateWork(1024, 1, 256, 256, 256, asked * tp)
    generate = Setting(model, ModelRole(dtype="bfloat16"), layout_of(devices, tp, sharded=True), machine)
    layout = layout_of(devices, sharded=True)
    train = Setting(model, ModelRole(dtype="bfloat16"), layout, machine, backend=DEEPSPEED_CHAT)
    batch = TrainWork(1024 * 512, 512, asked * 512, 1024 // (asked * devices), recompute="full")
    scored = 2 * inference_seconds(train, replace(batch, optimizer_steps=1))
    step = static_generate_seconds(hybrid_engine(generate), work) + scored + adapted_train_seconds(train, batch, 128)
    assert step * 131_900 / 1024 / 3600 == pytest.approx(hours, rel=0.12)


def test_mean_and_cut_share_tell_the_spread_of_lengths() -> None:
    found = lengths_with_cut(9000.0, 27648, 0.05)
    assert found.mean == pytest.approx(9000, rel=0.01)
    assert 1 - float(np.interp(27647, found.tokens, found.shares)) == pytest.approx(0.05, abs=0.002)
    assert found.mean_age > lengths_of(9000.0, 27648).mean_age


def test_a_share_of_cut_answers_tells_their_mean() -> None:
    mean = mean_with_cut(27648, 0.05)
    assert lengths_of(mean, 27648).quantile(0.95) == pytest.approx(27648, rel=0.02)
    assert mean_with_cut(27648, 0.01) < mean < mean_with_cut(27648, 0.10)


def test_a_step_in_another_unit_is_the_same_step() -> None:
    fields = {"system": "AReaL v0.3", "model": "DeepSeek-R1-Distill-Qwen-7B", "gpu": "H800", "n_gpus": "192"}
    hours = row(**fields, phase="e2e", metric="hours_for_1000_ppo_steps", value="25", unit="h", notes="async")
    seconds = next(rl_predictions([replace(hours, value="90000", unit="s")]))
    assert seconds.predicted == pytest.approx(3600 * next(rl_predictions([hours])).predicted)
    assert seconds.assumed and seconds.phase == "rl_step"
    assert not list(rl_predictions([replace(hours, unit="GB")]))


def test_an_unpublished_device_kind_is_said_with_the_other_prediction() -> None:
    fields = {"system": "nanotron", "model": "llama-1B", "gpu": "H100-80GB", "n_gpus": "16", "tp": "1", "pp": "1"}
    measured = {"metric": "throughput_per_gpu", "unit": "tokens/s/gpu", "value": "24200", "micro_batch": "1"}
    one = row(**fields, **measured, dp="16", seq_len="4096", global_batch="1024", notes="GPU type/seq_len inferred")
    told = next(predictions([one]))
    other = next(predictions([replace(one, gpu="A100-80GB")]))
    assert f"{other.predicted:.4g}" in told.assumed and not other.assumed


def test_nearly_full_memory_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mpt = {"system": "llm-foundry", "model": "MPT-30b", "tp": "1", "pp": "1", "seq_len": "8192", "gpu": "H100-80GB"}
    measured = {"metric": "throughput_per_gpu", "unit": "tokens/s/gpu", "value": "1384", "notes": "act-ckpt=True"}
    full, roomy = (row(**mpt, **measured, n_gpus=n, dp=n, global_batch="1344") for n in ("8", "64"))
    before = [one.predicted for one in predictions([full, roomy]) if one.phase == "train"]
    monkeypatch.setattr("benchmarks.published_train.CROWDED_SLOWDOWN", 1.0)
    after = [one.predicted for one in predictions([full, roomy]) if one.phase == "train"]
    assert after[0] == pytest.approx(1.06 * before[0])
    assert after[1] == before[1]


def test_an_rl_trainer_hands_its_weights_over_and_adapters_of_experts_are_many() -> None:
    moe, dense = (known(name) for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B"))
    assert written_seconds(dense, 16) < written_seconds(dense) < written_seconds(moe)
    assert written_seconds(moe, 16) > 48 * 128 * 3 * 2 * overheads().sync_tensor_seconds
    fields = {"system": "prime-rl", "model": "Qwen/Qwen3-4B", "gpu": "H100-80GB", "n_gpus": "8", "tp": "1", "pp": "1"}
    measured = {"metric": "step_time", "dp": "8", "seq_len": "16384", "global_batch": "16"}
    trainers = [row(**fields, **measured, notes=f"{kind} trainer only; AC=Recompute") for kind in ("SFT", "RL")]
    sft, rl = (one.predicted for one in predictions(trainers) if one.phase == "train")
    assert rl - sft == pytest.approx(written_seconds(dense, each_tensor=False)), (
        "files of that machine have not been seen"
    )


def test_every_row_prints_whether_it_fits_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = row(source="README (2022 snapshot)")
    failed = row(
        source="README (2022 snapshot)", metric="oom", value="1", unit="bool", micro_batch="64", tp="1", pp="1"
    )
    file, result = tmp_path / "rows.csv", tmp_path / "result.json"
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(Row.__struct_fields__)
        for one in (ran, failed):
            writer.writerow([getattr(one, name) for name in Row.__struct_fields__])
    monkeypatch.setattr(cost_model, "RESULTS", result)
    monkeypatch.setattr("sys.argv", ["cost_model", "--published", str(file), "--rows"])
    cost_model.main()
    assert "fits" in result.read_text()


def test_systems_that_disagree_tell_little() -> None:
    agreeing = shared_factor([[0.2] * 30, [0.2] * 30, [0.2] * 30])
    split = shared_factor([[0.9] * 30, [-0.5] * 30, [0.2] * 30])
    few = shared_factor([[0.2]])
    assert shared_factor([]) == 1
    assert 1 < split < few < agreeing <= math.exp(0.2)


def test_repeated_measurements_of_a_setting_are_ranked_once_and_targets_say_what_failed() -> None:
    found = [made("A", measured, predicted) for measured, predicted in [(1, 1), (2, 2), (3, 2), (9, 3), (4, 4), (5, 5)]]
    order = ranked(found)
    assert order == {"train: g": (5, pytest.approx(0.7))}
    claims = {one.name: one.met for one in targets(list(zip(found, found, strict=True)), order)}
    assert claims["order of 5: train: g"] is False
    assert claims["dense training: median error of 6"] is True


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["source", "system"])
    with pytest.raises(ValueError, match="lacks the columns"):
        list(read_rows(file))
