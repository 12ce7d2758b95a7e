"""Checkpoints of any layout are those of one process: each loads every other's, and writes the same bytes again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import LostPart
from realgraph.runtime.models.train_state import STATE
from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, call_of, minibatches, open_case, ranks_of, share
from tests.ranks import RankProcesses

ALONE = Layout(DeviceMesh(0, 1))


def save(ranks: LayoutRanks, case: Case, models: Path, target: Path, source: Path | None = None) -> tuple[int, int]:
    """One worker's part: save after four optimizer steps, or what was loaded. Returns version and optimizer steps."""
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("model", "written", "read"),
    [
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
        assert found == ((1, 4) if worker in LAYOUTS[read].mesh.devices else (0, 0))
    assert files(tmp_path / "read") == expected

    one = LayoutRanks.alone(torch.device("cpu"))
    assert save(one, replace(case, layout=ALONE), models, tmp_path / "one", tmp_path / "written") == (1, 4)
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
