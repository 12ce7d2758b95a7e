"""Weights of a model folder that are missing or damaged: `check` names the file, before anything starts."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from realgraph.graphs.errors import Where
from realgraph.run_file.compose import check_run
from tests.run_texts import place, refused

__all__ = ["place"]

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def shard_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for i, shard in enumerate(SHARDS):
        save_file({f"w{i}": np.ones(64, np.float32)}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{i}": shard for i, shard in enumerate(SHARDS)}}))


def test_whole_shards_are_a_model(place: Path) -> None:
    shard_weights(place / "model")
    check_run(place / "run.yaml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", f"lacks {SHARDS[1]}, which {INDEX} names (1 of 2 files are missing)"),
        ("cut short", f"{SHARDS[1]} is cut short, or no safetensors file"),
        ("no index", f"has .safetensors files, but neither model.safetensors nor {INDEX}"),
        ("bad index", f"{INDEX} is no index of weights"),
    ],
)
def test_shards_that_are_no_model_are_refused(place: Path, name: str, text: str) -> None:
    folder = place / "model"
    shard_weights(folder)
    match name:
        case "missing":
            (folder / SHARDS[1]).unlink()
        case "cut short":
            os.truncate(folder / SHARDS[1], 200)
        case "no index":
            (folder / INDEX).unlink()
        case "bad index":
            (folder / INDEX).write_text("{}")
    (problem,) = refused(place)
    assert problem.where == Where(str(place / "run.yaml"), 2, "$.models.actor.path")
    assert text in problem.text and "hf download" in problem.hint


def test_a_single_file_that_is_cut_short_is_refused(place: Path) -> None:
    os.truncate(place / "model" / "model.safetensors", 5)
    (problem,) = refused(place)
    assert "model/model.safetensors is cut short, or no safetensors file" in problem.text
