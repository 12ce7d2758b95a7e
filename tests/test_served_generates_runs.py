"""Real runs of graphs that generate more than once, each call on SGLang servers of its own (the stand-in)."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.runs import assert_gaps, finish, home, least_updates, logs, merged, numbers, records, start, write_run
from tests.sglang_server import interpreter, servers_at, standin
from tests.test_generates_runs import debate_of, file_of, run_of
from tests.test_samples import CALLS, tree

pytest.importorskip("torch")
__all__ = ["home"]

ONE, TWO = {"first": 1, "devices": 1}, {"first": 2, "devices": 1}
APART = {"cluster": {"devices": 3}, "allocation": {"rollout": ONE, "LATER": TWO}, "runtime": {"verify_weights": 1}}


def served(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"rollout": {"engine": "sglang", "python": str(interpreter(tmp_path)), **more}}


def assert_trained_on_its_own(steps: dict[int, dict[str, float]], n_steps: int, staleness: int) -> None:
    """Every step is there, none of its tokens too old, and each has the log-probability that its trainer gives it."""
    assert sorted(steps) == list(range(n_steps))
    assert all(0 <= metrics["staleness/max"] <= staleness for metrics in steps.values())
    assert_gaps(steps.values(), n_steps, staleness)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "staleness"), [("remax", 1), ("judge", 0)])
def test_each_call_has_servers_of_its_own(home: Path, tmp_path: Path, graph: str, staleness: int) -> None:
    """Both calls of ReMax take new weights of their one role, those at least that samples of the last step must have;
    the judge's never change."""
    name, n_steps = f"{graph}-served-{staleness}", 4
    folder = run_of(home, name, graph, served(tmp_path), APART, {"staleness": staleness})
    assert_trained_on_its_own(numbers(folder), n_steps, staleness)
    later = "greedy" if graph == "remax" else "judge"
    texts = {call: (folder / "logs" / f"sglang-{call}-0.log").read_text() for call in ("rollout", later)}
    updates = {call: text.count('"POST /update_weights_from_disk HTTP/1.1" 200') for call, text in texts.items()}
    least = least_updates(n_steps, staleness)
    assert updates["rollout"] >= least and (updates[later] >= least if graph == "remax" else updates[later] == 0)
    assert not list(folder.rglob("*-weights-*"))
    assert not servers_at(home)


@pytest.mark.slow
def test_weights_of_two_trained_roles_are_broadcast_to_the_servers_of_each(home: Path, tmp_path: Path) -> None:
    """One worker trains both, and gathers the weights of both at once."""
    n_steps = 5
    places = {"cluster": {"devices": 3}, "allocation": {"first": ONE, "second": TWO}, "staleness": 1, "steps": n_steps}
    corrected = {"loss": {"terms": {"policy": {"off_policy": {"kind": "decoupled"}}}}}
    calls = {"calls": {f"{role}_train": corrected for role in ("pro", "con")}, "runtime": {"verify_weights": 1}}
    steps = debate_of(home, "served", served(tmp_path, weights="broadcast"), places, calls)
    assert_trained_on_its_own(steps, n_steps, 1)
    assert_broadcast(home / "served", ("first", "second"), least_updates(n_steps, 1))


@pytest.mark.slow
def test_weights_of_one_role_are_broadcast_to_the_servers_of_two_calls(home: Path, tmp_path: Path) -> None:
    n_steps = 5
    more = {"staleness": 1, "steps": n_steps}
    folder = run_of(home, "remax-broadcast", "remax", served(tmp_path, weights="broadcast"), APART, more)
    assert_trained_on_its_own(numbers(folder), n_steps, 1)
    assert_broadcast(folder, ("rollout", "greedy"), least_updates(n_steps, 1))


def assert_broadcast(folder: Path, calls: tuple[str, str], least: int) -> None:
    """Broadcasts went to the servers of both, as many as the bound asks for, and none failed."""
    for call in calls:
        text = (folder / "logs" / f"sglang-{call}-0.log").read_text()
        assert text.count('"POST /update_weights_from_distributed HTTP/1.1" 200') >= least, call
    assert "no broadcast" not in logs(folder)
    assert not list(folder.rglob("sglang-weights-*"))


TWO_MODELS: dict[str, Any] = {
    "graph": "scoring.yaml",
    "models": {"actor": {"path": "model"}, "other": {"path": "other"}},
    "steps": 3,
    "data": {"columns": {"prompt": "prompt", "answer": "answer"}},
    "allocation": {"rollout": {"first": 0, "devices": 1}, "judge": ONE},
}


def write_two_models(home: Path) -> None:
    """The graph of TWO_MODELS, where all is greedy, and its second model."""
    calls = merged({name: CALLS[name] for name in ("rollout", "question", "judge")}, {"rollout": {"temperature": 0}})
    (home / "scoring.yaml").write_text(json.dumps(tree(calls)))
    tiny.save(home / "other", seed=5)
    for file in (home / "model").glob("*token*"):  # of which a real server makes its first prompt
        shutil.copy(file, home / "other")


def texts_of(folder: Path) -> list[tuple[str, str, str]]:
    """Prompt, text and verdict of all samples of a run."""
    lines = [json.loads(line) for file in (folder / "samples").iterdir() for line in file.read_text().splitlines()]
    return sorted((line["prompt"], line["rollout.text"], line["judge.text"]) for line in lines)


@pytest.mark.slow
def test_greedy_samples_of_servers_are_those_of_embedded_engines(home: Path, tmp_path: Path) -> None:
    """Two models, of which the second reads what the first has written; on servers that are given, too."""
    write_two_models(home)
    found = {}
    with standin(home / "model", tmp_path / "a") as one, standin(home / "other", tmp_path / "b") as other:
        given = {"engine": "sglang", "urls": {"rollout": [one.url], "judge": [other.url]}}
        engines = {"embedded": {}, "started": served(tmp_path), "given": {"rollout": given}}
        for name, rollout in engines.items():
            finish(home, "run", str(write_run(home, name, TWO_MODELS, rollout)), name=name)
            found[name] = texts_of(home / name)
    assert len(set(found["embedded"])) > 3
    assert found["started"] == found["given"] == found["embedded"]


@pytest.mark.slow
def test_a_run_outlives_the_server_of_its_later_call(home: Path, tmp_path: Path) -> None:
    file = file_of(home, "killed", "judge", served(tmp_path), APART, {"staleness": 1, "steps": 12})
    run = start(home, "run", str(file), name="killed")
    run.until_step(3)
    before = servers_at(run.home)
    assert len(before) == 2
    for server in before:
        os.kill(server, signal.SIGKILL)
    run.until(lambda: len(set(servers_at(run.home)) - set(before)) == 2, "other servers")
    assert run.wait() == 0, run.output() + logs(run.folder)
    assert [step["step"] for step in records(run.folder)] == list(range(12))
    for call in ("rollout", "judge"):
        assert (run.folder / "logs" / f"sglang-{call}-0.log").read_text().count("fired up") == 2
    assert not servers_at(run.home)
