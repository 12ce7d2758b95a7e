"""Real asynchronous runs in which new weights come while samples are made, by each way that these may go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import finish, home, merged, records, write_run

pytest.importorskip("torch")
__all__ = ["home"]

NOTES = '''
import json
from pathlib import Path

HERE = Path(__file__).parent

def note(batch, outputs, run):
    """A loss term of 0 that writes down the versions of each sample's tokens."""
    versions, index = batch.token_keys["versions"], batch.sample_index()
    found = [sorted(set(versions[batch.mask & (index == i)].tolist())) for i in range(batch.n_samples)]
    with (HERE / f"{run}-versions").open("a") as file:
        file.write(json.dumps(found) + "\\n")
    return outputs.logprobs * 0.0
'''
APART = {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}
RUN: dict[str, Any] = {
    "graph": "grpo",
    "params": {"group_size": 4, "lr": 3.0e-3},
    "steps": 8,
    "staleness": 2,
    "batch": {"max_new_tokens": 48},
    "runtime": {"verify_weights": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["apart", "in_place"])
@pytest.mark.parametrize("interrupt", ["recompute", "keep_kv", "wait"])
def test_samples_under_way_go_on_as_the_run_file_says(home: Path, interrupt: str, place: str) -> None:
    name = f"{interrupt}-{place}"
    (home / "notes.py").write_text(NOTES)
    term = {"note": {"kind": "apply", "fn": "notes:note", "reads": ["versions"], "args": {"run": name}}}
    limits = {"interrupt": interrupt, "max_running": 4}  # generation, not training, is what takes the time
    config = merged(RUN, {"rollout": limits, "calls": {"train": {"loss": {"terms": term}}}})
    where = {"allocation": APART} if place == "apart" else {"cluster": {"devices": 1}}
    finish(home, "run", str(write_run(home, name, config, where)), name=name)
    lines = [json.loads(line) for line in (home / f"{name}-versions").read_text().splitlines()]
    mixed = [versions for line in lines[1:] for versions in line if len(versions) > 1]
    assert len({version for line in lines for versions in line for version in versions}) > 2
    assert bool(mixed) == (interrupt != "wait"), (interrupt, mixed)
    steps = [record["metrics"] for record in records(home / name)]
    assert any("train/update_gap" in step for step in steps)
    for step in steps:
        gaps = {metric: value for metric, value in step.items() if metric.endswith("_gap")}
        assert all(value < 1e-3 for value in gaps.values()), gaps


def test_an_update_of_weights_that_another_call_reads_too_waits_for_no_later_step(home: Path) -> None:
    """The generator's copy also gives log-probabilities, so that all workers look at an update when it comes."""
    logp = {"kind": "inference", "model": "actor", "output": "logprobs", "writes": ["logp"]}
    where = {**APART, "logp": {"first": 1, "devices": 1}}
    config = merged(RUN, {"calls": {"logp": logp}, "allocation": where, "steps": 5})
    finish(home, "run", str(write_run(home, "shared-copy", config)), name="shared-copy")
    steps = [record["metrics"] for record in records(home / "shared-copy")]
    assert any(gap < 1e-3 for step in steps for metric, gap in step.items() if metric == "reallocate/update_gap")
