"""Runs under a layout beside those of one device, for tests: the same numbers, and the same after a resume."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runs import GRPO, finish, numbers, write_run

STEPS = 4
SAVED: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"every": 2, "keep": 9},
    "runtime": {"verify_weights": 1},
}
WHAT: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "grpo_deep": {**GRPO, "models": {"actor": {"path": "deep"}}},  # of a folder that a test makes
    "ppo": {
        "graph": "ppo",
        "params": {"actor_lr": 3e-3, "critic_lr": 3e-3},
        "batch": {"groups": 16},
        "calls": {"reward": {"fn": "rewards:score"}},
    },
    "sft": {
        "graph": "sft",
        "params": {"lr": 3e-3, "minibatches": 2},
        "data": {"columns": {"prompt": "prompt", "response": "answer", "answer": None}},
    },
}
NOT_ALIKE = ("logprob_gap", "entropy")  # differences of rounding alone; over the first micro-batch of each rank
TOLERANCE = 2e-3  # of float32, after steps that amplify rounding


@dataclass(frozen=True)
class LayoutRun:
    """A run. what: of `WHAT`; allocation: the pins of its calls."""

    name: str
    what: str
    n_devices: int = 1
    allocation: dict[str, Any] = field(default_factory=dict)


_done: dict[str, Path] = {}


def ran(home: Path, run: LayoutRun) -> Path:
    """The directory of a run that has ended well; each is run once, when it is first asked for."""
    if run.name not in _done:
        machine = {"cluster": {"devices": run.n_devices}, "allocation": run.allocation}
        finish(home, "run", str(write_run(home, run.name, WHAT[run.what], SAVED, machine)), name=run.name)
        _done[run.name] = home / run.name
    return _done[run.name]


def check_numbers(home: Path, run: LayoutRun) -> None:
    """The run follows its pins, and has the numbers of one device."""
    plan = json.loads((ran(home, run) / "plan.json").read_text())["allocations"]
    for call, pin in run.allocation.items():
        chosen = {**plan[call], **plan[call]["layout"]}
        for name in ("tp", "pp", "cp", "dp", "residency", "recompute", "schedule", "chunks"):
            assert chosen[name] == pin.get(name, chosen[name]), (call, name)
    ours, theirs = numbers(ran(home, run)), numbers(ran(home, LayoutRun(f"{run.what}_alone", run.what)))
    assert ours.keys() == theirs.keys() == set(range(STEPS))
    for step, expected in theirs.items():
        assert ours[step].keys() == expected.keys()
        for metric, value in expected.items():
            if not metric.endswith(NOT_ALIKE):
                assert ours[step][metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (step, metric)


def check_resume(home: Path, folder: Path, run: LayoutRun) -> None:
    """Stopped in the middle and resumed in `folder`, the run has the numbers and files of the one that went on."""
    check_resumed(ran(home, run), folder)


def check_resumed(whole: Path, folder: Path) -> None:
    """The same of a run that has ended in `whole`."""
    shutil.copytree(whole, folder, symlinks=True)
    shutil.rmtree(folder / f"checkpoints/step-{STEPS:06d}")
    (folder / "metrics.jsonl").unlink()
    finish(whole.parent, "run", "--resume", str(folder), name=whole.name)
    ours, theirs = numbers(folder), numbers(whole)
    assert ours.keys() == set(range(2, STEPS))
    for step in ours:
        for metric, value in ours[step].items():  # shares of several workers add up as they come
            assert value == pytest.approx(theirs[step][metric], rel=1e-12), (step, metric)
    last = f"checkpoints/step-{STEPS:06d}"
    files = [path.relative_to(whole) for path in (whole / last).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors"}
    for file in files:
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
