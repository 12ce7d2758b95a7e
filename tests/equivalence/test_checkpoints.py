"""Checkpoints of any layout are those of one process: each loads every other's, and writes the same bytes again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from realgraph.graphs.errors import ConfigError
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.models.train_state import STATE
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.errors import LostPart
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, call_of, minibatches, open_case, ranks_of, share
from tests.ranks import RankProcesses

ALONE = Layout(DeviceMesh(0, 1))


def save(ranks: LayoutRanks, case: Case, models: Path, target: Path, source: Path | None = None) -> tuple[int, int]:
    """One worker's part: save after two optimizer steps, or what was loaded. Returns version and optimizer steps."""
    here = ranks_of(case, ranks)
    if here is None:
        return (0, 0)
    engine = open_case(case, models, here)
    if source is None:
        engine.train(call_of(case), share(minibatches(case.dtype, 0), here))
    else:
        engine.load(source)
    engine.save(target)
    return engine.version, engine.optimizer_steps


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


PAIRS = [
    ("qwen3", "tp2", "tp4"),
    ("qwen2", "tp4", "dp2 tp2"),
    ("gemma2", "dp2 tp2", "fsdp2 tp2"),
    ("llama", "fsdp2 tp2", "tp2 apart"),
    ("gemma3", "fsdp2 cp2", "dp2 cp2"),
    ("qwen3 deep", "pp2 uneven", "tp2 pp2 twice"),
    ("llama deep", "fsdp2 pp2 twice", "pp4"),
    ("qwen3_moe", "ep4 tp2", "fsdp2"),
    ("mixtral", "ep2 fsdp4", "ep2 tp4"),
    ("qwen3_moe", "ep2 fsdp2 cp2", "ep2 pp2"),
    ("mixtral", "ep2 fsdp2 pp2", "ep4 dp2 cp2"),
    ("gpt_oss", "ep2 tp2 pp2", "tp4"),
    ("gpt_oss", "fsdp2 tp2", "ep2 fsdp2 cp2"),
    ("deepseek", "ep2 tp2 pp2", "fsdp2 tp2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "written", "read", "dtype"),
    [
        *((*pair, "bfloat16") for pair in PAIRS),  # whose masters lie beside the weights
        *((*pair, "float32") for pair in PAIRS[::3]),  # whose weights are their masters
        *((*pair, "float16") for pair in PAIRS[3::6]),
    ],
)
def test_every_layout_reads_and_writes_the_files_of_one_process(
    four: RankProcesses, models: Path, tmp_path: Path, model: str, written: str, read: str, dtype: Any
) -> None:
    case = Case(model, "sft", dtype, LAYOUTS[written])
    four.run(save, case, models, tmp_path / "written")
    expected = files(tmp_path / "written")
    assert expected.keys() >= {"model.safetensors", "optimizer.safetensors", STATE}

    for worker, found in enumerate(
        four.run(save, replace(case, layout=LAYOUTS[read]), models, tmp_path / "read", tmp_path / "written")
    ):
        assert found == ((1, 2) if worker in LAYOUTS[read].mesh.devices else (0, 0))
    assert files(tmp_path / "read") == expected

    one = LayoutRanks.alone(torch.device("cpu"))
    assert save(one, replace(case, layout=ALONE), models, tmp_path / "one", tmp_path / "written") == (1, 2)
    assert files(tmp_path / "one") == expected


def rescue(ranks: LayoutRanks, case: Case, models: Path, target: Path, left: tuple[int, ...]) -> str:
    """One of the workers that are left writes its share of a state from before a call, by itself. Its error."""
    here = ranks_of(case, ranks)
    if here is None:
        return ""
    engine = open_case(case, models, here)
    batches = share(minibatches(case.dtype, 0), here)
    engine.train(call_of(case), batches)
    engine.save(target / "saved")
    state = engine.snapshot()
    engine.train(call_of(case), batches)
    try:
        if ranks.mesh.rank in left:
            state.write(target / "rescued", left)
    except LostPart as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "left", "missing"),
    [
        ("dp2", (1,), ""),
        ("dp2 tp2", (0, 1, 2), "no worker holds [46:61, 0:32] of 'model.embed_tokens.weight'"),  # of its moments
        ("dp2 tp2", (1, 3), "no worker holds [0:31, 0:32] of 'model.embed_tokens.weight'"),
        ("fsdp2 tp2", (0, 1, 2), "no worker holds [46:61, 0:32] of 'model.embed_tokens.weight'"),
    ],
)
def test_those_that_are_left_save_the_state_or_name_what_is_missing(
    four: RankProcesses, models: Path, tmp_path: Path, name: str, left: tuple[int, ...], missing: str
) -> None:
    errors = four.run(rescue, Case("qwen3", "sft", "bfloat16", LAYOUTS[name]), models, tmp_path, left)
    assert errors == [missing if worker in left else "" for worker in range(4)]
    if not missing:
        assert files(tmp_path / "rescued") == files(tmp_path / "saved")


# --- what can't be read -----------------------------------------------------------------------------------------------


def refused(ranks: LayoutRanks, case: Case, models: Path, source: Path | None) -> str:
    """The error of one worker that opens a model, or goes on from a checkpoint; '' where there is none."""
    here = ranks_of(case, ranks)
    if here is None:
        return ""
    try:
        engine = open_case(case, models, here)
        if source is not None:
            engine.load(source)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("llama", "mlp.down_proj.weight' has shape (32, 51), the config asks for (32, 48)"),
        ("qwen2", "self_attn.k_proj.bias' has no place in Qwen3ForCausalLM"),
        ("mixtral", "has no place in Qwen3ForCausalLM"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_every_worker_that_would_read_it(
    four: RankProcesses, models: Path, tmp_path: Path, model: str, says: str
) -> None:
    save(LayoutRanks.alone(torch.device("cpu")), Case(model, "sft", "float32", ALONE), models, tmp_path / "other")
    for name in ("tp2", "fsdp2", "dp2 pp2"):
        layout = LAYOUTS[name]
        found = four.run(refused, Case("qwen3", "sft", "float32", layout), models, tmp_path / "other")
        told = [text for worker, text in enumerate(found) if worker in layout.mesh.devices]
        assert all(says in text and str(tmp_path / "other") in text for text in told), told


def test_workers_name_an_expert_that_is_missing_in_a_layer_of_theirs(
    four: RankProcesses, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "qwen3_moe", tmp_path / "qwen3_moe")
    file, gone = tmp_path / "qwen3_moe" / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != gone}, file, {"format": "pt"})
    for name, holders in (("ep2", [0, 1]), ("tp2", [0, 1])):
        found = four.run(refused, Case("qwen3_moe", "sft", "float32", LAYOUTS[name]), tmp_path, None)
        assert [worker for worker, text in enumerate(found) if f"the checkpoint lacks '{gone}'" in text] == holders
        assert [worker for worker, text in enumerate(found) if text] == holders
