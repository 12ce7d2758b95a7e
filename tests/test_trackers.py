"""Trackers: what they are told, what becomes of a run where they fail, and where a run that goes on finds its own."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.runtime.job.job import OutputSpec, TrackerName
from realgraph.runtime.master.observer import EvalRecord, Observer, Observers, RunEnded, StepRecord
from realgraph.runtime.master.trackers import make_trackers
from realgraph.screen.console import PlainLines
from realgraph.screen.terminal import Terminal


class Client:
    """A tracker's package that writes down how it is called; `broken`: what it raises from there on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.broken: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name in self.broken:
                raise self.broken[name]
            return SimpleNamespace(id=kwargs.get("id") or "w1", info=SimpleNamespace(run_id="m1"))

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, found)
    return found


def begin(name: TrackerName, folder: Path, **settings: object) -> Observer:
    (tracker,) = make_trackers(OutputSpec(trackers=(name,)), folder, "grpo", settings)
    return tracker


def test_a_service_that_fails_costs_the_run_nothing(client: Client, tmp_path: Path) -> None:
    out = io.StringIO()
    watchers = Observers([begin("mlflow", tmp_path), PlainLines(Terminal(file=out, width=200), every_seconds=0)])
    client.broken["log_metrics"] = RuntimeError("the server is gone")
    for step in range(3):
        watchers.observe(StepRecord(step, 1.0, {"train/loss": 1.0}))
    watchers.observe(RunEnded(3, "finished", ok=True))
    watchers.close()
    assert out.getvalue().count("mlflow gets no more metrics (metrics.jsonl has them all): the server is gone") == 1
    assert len(client.of("log_metrics")) == 1 and not client.of("end_run")


def test_a_service_that_refuses_the_run_is_named(client: Client, tmp_path: Path) -> None:
    client.broken["init"] = ConnectionError("api_key not configured")
    with pytest.raises(ConfigError, match=r"outputs\.trackers: wandb can't begin: api_key not configured"):
        begin("wandb", tmp_path)


def test_an_evaluation_may_come_after_the_next_step(client: Client, tmp_path: Path) -> None:
    tracker = begin("wandb", tmp_path)
    for record in (StepRecord(5, 1.0, {"train/loss": 1.0}), EvalRecord(4, {"accuracy": 0.5})):
        tracker.observe(record)
    assert client.of("define_metric") == [(("*",), {"step_metric": "step"})]
    assert client.of("log")[1] == (({"eval/accuracy": 0.5, "step": 4},), {})


def test_a_run_that_goes_on_goes_on_in_its_trackers(client: Client, tmp_path: Path) -> None:
    for _ in range(2):
        for name in ("wandb", "trackio", "mlflow"):
            begin(name, tmp_path, steps=3).close()
    wandb, trackio, again, trackio_again = (kwargs for _, kwargs in client.of("init"))
    assert wandb["id"] is None and again["id"] == "w1"
    assert trackio["name"] == trackio_again["name"] != "grpo"
    assert [kwargs for _, kwargs in client.of("start_run")] == [{"run_name": "grpo"}, {"run_id": "m1"}]
    assert client.of("log_params") == [(({"steps": 3},), {})]
    other = tmp_path / "other"
    other.mkdir()
    begin("wandb", other)
    assert client.of("init")[-1][1]["id"] is None


def test_a_run_that_ends_without_a_word_ends_there_as_failed(client: Client, tmp_path: Path) -> None:
    tracker = begin("wandb", tmp_path)
    for _ in range(2):
        tracker.close()
    assert client.of("finish") == [((), {"exit_code": 1})]
