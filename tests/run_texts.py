"""A run file with its data and its model in a folder, and what the check says about a changed one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.run_file.compose import check_run

ROOT = Path(__file__).parent.parent
RUN = """\
graph: grpo
models: {actor: {path: model}}
data:
  path: data/train.jsonl
  columns: {prompt: question}
batch: {groups: 4, max_new_tokens: 16}
params:
  group_size: 2
  lr: 2e-6
calls:
  reward: {fn: "my_rewards:score", args: {strict: true}}
steps: 3
"""
REWARDS = "def score(text: str, answer: str, strict: bool) -> float:\n    return float(text == answer)\n"


def write_model(folder: Path, **config: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # of no tensor


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run file, its data and its model."""
    write_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def problems_of(call: Callable[[], object]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        call()
    return list(caught.value.problems)


def refused(place: Path, *overrides: str) -> list[Problem]:
    return problems_of(lambda: check_run(place / "run.yaml", overrides))
