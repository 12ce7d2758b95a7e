"""Trackers: what they are told, what becomes of a run where they fail, and where a run that goes on finds its own."""

import io
import sys
from pathlib import Path
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.runtime.job.job import OutputSpec, TrackerName
from realgraph.runtime.master import trackers
from realgraph.runtime.master.observer import (
    EvalRecord,
    Observers,
    RunEnded,
    RunRecord,
    StepRecord,
    WatcherLost,
)
from realgraph.runtime.master.trackers import TrackerObserver, make_trackers
from realgraph.screen.console import PlainLines
from realgraph.screen.terminal import Terminal
from tests.waiting import until


class Client:
    """A tracker's package that writes down how it is called; `broken`: what it raises from there on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.broken: dict[str, Exception] = {}
        self.slow: dict[str, Event] = {}
        self.threads: list[tuple[str, Thread]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            self.threads.append((name, current_thread()))
            if name in self.slow:
                self.slow[name].wait(10)
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


def begin(name: TrackerName, folder: Path, **settings: object) -> TrackerObserver:
    (tracker,) = make_trackers(OutputSpec(trackers=(name,)), folder, "grpo", settings)
    return tracker


def test_a_service_that_fails_costs_the_run_nothing(client: Client, tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = begin("mlflow", tmp_path)
    watchers = Observers([tracker, PlainLines(Terminal(file=out, width=200), every_seconds=0)])
    client.broken["log_metrics"] = RuntimeError("the server is gone")
    watchers.observe(StepRecord(0, 1.0, {"train/loss": 1.0}))
    assert until(lambda: bool(client.of("log_metrics")) and all(call.done() for call in tracker._pending))
    for step in range(1, 3):
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
    tracker.close()
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


def test_a_service_that_is_slow_holds_up_no_step(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "END_SECONDS", 0.2)
    tracker, gate = begin("mlflow", tmp_path), Event()
    client.slow["log_metrics"] = gate
    try:
        for record in (StepRecord(0, 1.0, {}), StepRecord(1, 1.0, {}), RunEnded(2, "finished", ok=True)):
            tracker.observe(record)
        with pytest.raises(WatcherLost, match=r"it has not answered within 0\.2 s"):
            tracker.close()
        tracker.close()
    finally:
        gate.set()


def test_all_calls_of_a_service_come_from_one_thread(client: Client, tmp_path: Path) -> None:
    """The active run of MLflow is one of a thread."""
    tracker = begin("mlflow", tmp_path)
    tracker.observe(StepRecord(0, 1.0, {}))
    tracker.close()
    (thread,) = {one for _, one in client.threads}
    thread.join(10)
    assert not thread.is_alive()


def test_what_a_resumed_run_repeats_is_told_once(client: Client, tmp_path: Path) -> None:
    """Not the newest: a kill may have come between the file and the service."""
    recorded: list[RunRecord] = [
        StepRecord(0, 1.0, {}),
        EvalRecord(1, {}),
        StepRecord(1, 1.0, {}),
        StepRecord(2, 1.0, {}),
    ]
    for start in range(2):
        tracker = begin("wandb", tmp_path)
        for record in (*recorded, EvalRecord(3, {}))[start:]:
            tracker.observe(record)
        tracker.close()
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in recorded)
        (tmp_path / "metrics.jsonl").write_bytes(lines + b'{"type":"start","plan":{}}\nno record\n{"type":"st')
    told = [args[0] for args, _ in client.of("log")]
    assert [(one["step"], "step_seconds" in one) for one in told] == [
        *[(0, True), (1, False), (1, True), (2, True), (3, False)],
        *[(2, True), (3, False)],
    ]
    other = begin("mlflow", tmp_path)  # which has nothing of this run
    other.observe(recorded[0])
    other.close()
    assert len(client.of("log_metrics")) == 1


def test_a_run_that_ends_without_a_word_ends_there_as_failed(client: Client, tmp_path: Path) -> None:
    tracker = begin("wandb", tmp_path)
    for _ in range(2):
        tracker.close()
    assert client.of("finish") == [((), {"exit_code": 1})]
