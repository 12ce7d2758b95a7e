"""Real runs that train on a sequence of each row beside what they sample: the same numbers as without sampling."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.audit import judge_run
from tests.runs import GRPO, finish, home, merged, numbers, write_run

pytest.importorskip("torch")
__all__ = ["home"]

ROOT = Path(__file__).parent.parent
COLUMNS = {"columns": {"prompt": "prompt", "response": "answer"}}
ALONE: dict[str, Any] = {"columns": {**COLUMNS["columns"], "answer": None}}
EVAL = {"every": 2, "data": {"path": "test.jsonl", "columns": {"prompt": "prompt", "answer": "answer"}}}
# Without memory of earlier gradients AdamW leaves the weights alone where a gradient is 0: that of equal rewards.
FORGETFUL = {"betas": [0.0, 0.0]}
SFT = {
    "kind": "train",
    "model": "actor",
    "samples": "data",
    "lr": 3.0e-3,
    "minibatches": 2,
    "optimizer": FORGETFUL,
    "loss": {"terms": {"cross_entropy": {}}},
}
EQUAL_REWARDS = "def score(text: str, answer: str) -> float:\n    return 1.0\n"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"cluster": {"devices": 1}},
    "two": {"allocation": {name: {"first": 0, "devices": 2} for name in ("rollout", "train", "sft")}},
    "another": {  # role, on other devices than those that have the rows
        "models": {"student": {"path": "model", "trainable": True}},
        "calls": {"sft": {"model": "student"}},
        "allocation": {
            "sft": {"first": 1, "devices": 1},
            **{name: {"first": 0, "devices": 1} for name in ("rollout", "train")},
        },
    },
    "late": {
        "staleness": 1,
        "allocation": {
            "rollout": {"first": 0, "devices": 1},
            **{name: {"first": 1, "devices": 1} for name in ("train", "sft")},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_trains_on_the_data_beside_samples_as_it_does_alone(home: Path, layout: str) -> None:
    """Samples with equal rewards teach nothing, so losses are those of fine-tuning alone."""
    (home / "equal.py").write_text(EQUAL_REWARDS)
    alone = {"graph": "sft", "params": {"lr": 3.0e-3, "minibatches": 2}, "calls": {"train": {"optimizer": FORGETFUL}}}
    if not (home / "sft-alone").exists():
        finish(home, "run", str(write_run(home, "sft-alone", alone, {"steps": 3, "data": ALONE})), name="sft-alone")
    calls = {"sft": SFT, "train": {"optimizer": FORGETFUL}, "reward": {"fn": "equal:score"}}
    run = merged(
        GRPO, {"calls": calls, "data": COLUMNS, "steps": 3, "eval": EVAL, "outputs": {"audit": True}}, LAYOUTS[layout]
    )
    name = f"beside-{layout}"
    finish(home, "run", str(write_run(home, name, run)), name=name)
    found, expected = numbers(home / name), numbers(home / "sft-alone")
    assert [metrics["sft/loss"] for metrics in found.values()] == pytest.approx(
        [metrics["train/loss"] for metrics in expected.values()], abs=1e-5
    )
    assert expected[2]["train/loss"] < expected[0]["train/loss"]
    assert found[0]["reward/reward"] == 1.0
    assert found[0]["batch/trained_tokens"] == found[0]["train/n_tokens"] + found[0]["sft/n_tokens"]
    assert judge_run(home / name).problems == ()


def test_the_gate_holds_where_the_data_are_trained_on_first(home: Path) -> None:
    """Then no sample is of the weights that the policy gradient meets, and probes are drawn instead."""
    calls = {"sft": SFT, **yaml.safe_load((ROOT / "graphs/library/grpo.yaml").read_text())["calls"]}
    del calls["ref_logp"], calls["train"]["loss"]["terms"]["kl"]
    graph = {
        "name": "first",
        "params": {"group_size": 4, "temperature": 1.0, "clip_low": 0.2, "clip_high": 0.2, "lr": 3.0e-3}
        | {"minibatches": 1, "epochs": 1},
        "inputs": {"prompt": "group tokens", "answer": "group text"},
        "models": {"actor": {"trainable": True}},
        "calls": merged(calls, {"reward": {"fn": "rewards:score"}, "train": {"optimizer": FORGETFUL}}),
    }
    (home / "first.graph.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    run = {"graph": "first.graph.yaml", "data": COLUMNS, "steps": 2, "cluster": {"devices": 1}}
    finish(home, "run", str(write_run(home, "first", run)), name="first")
    for metrics in numbers(home / "first").values():
        gaps = [value for name, value in metrics.items() if name.endswith("update_gap")]
        assert gaps and max(gaps) < 1e-3, metrics
        assert metrics["train/grad_norm"] > 0.0
