"""Outputs of a run: files that survive a kill, atomic folders, trackers, the screen, pass@k."""

import io
import itertools
import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.run.ending import seconds_lines
from realgraph.runtime.commands.actions import CallSpan, StepEnded
from realgraph.runtime.job.job import OutputSpec
from realgraph.runtime.job.rotation import limit_log, older
from realgraph.runtime.job.run_folder import RunFolder, exclusive, point_link, write_atomic
from realgraph.runtime.master.checkpoint_folders import commit_folder, prune
from realgraph.runtime.master.observer import (
    EvalRecord,
    Note,
    PlannedSeconds,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)
from realgraph.runtime.master.records import MetricsFile, TraceFile, TranscriptsFile
from realgraph.runtime.master.step_metrics import flatten, planned_of, queue_seconds
from realgraph.runtime.master.trackers import make_trackers
from realgraph.runtime.processes.local import WorkerHandle
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.worker.evaluation import pass_at_k
from realgraph.runtime.worker.resources import DeviceMemory
from realgraph.screen.console import LiveScreen, PlainLines, sparkline, summary
from realgraph.screen.terminal import Terminal
from tests.shapes import Shape, job_of

STARTED = RunStarted("name", "grpo", steps=3, first_step=0, run_dir="/runs/x", calls=("rollout", "train"))
STEP = StepRecord(0, 0.5, {"reward/reward": 0.25, "train/loss": 1.5, "rollout/seconds": 0.2, "train/seconds": 0.3})
RECORDS = (
    STARTED,
    Span(0, "rollout", 0, 10.0, 10.25),
    Span(1, "train", 0, 10.25, 10.5),
    STEP,
    EvalRecord(1, {"accuracy": 0.5}, best=True),
    Transcript(0, "'1+1=' '2'"),
    Note("careful [not markup]", "warning"),
    RunEnded(1, "finished", ok=True),
)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n: int, k: int, n_right: int) -> None:
    n_right, k = min(n_right, n), min(k, n)
    draws = list(itertools.combinations([True] * n_right + [False] * (n - n_right), k))
    assert pass_at_k(n, n_right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_k_refuses_more_draws_than_samples() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples"):
        pass_at_k(2, 1, 3)


def test_metrics_and_transcripts_are_json_lines_that_a_resumed_run_appends_to(tmp_path: Path) -> None:
    for _ in range(2):
        files = (MetricsFile(tmp_path / "metrics.jsonl"), TranscriptsFile(tmp_path / "transcripts.jsonl"))
        for record in RECORDS:
            for file in files:
                file.observe(record)
        for file in files:
            file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["start", "step", "eval", "end"] * 2
    assert lines[1]["metrics"]["reward/reward"] == 0.25
    transcripts = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    assert [line["text"] for line in transcripts] == ["'1+1=' '2'"] * 2


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
def test_trace_is_readable_even_if_the_run_was_killed(tmp_path: Path, closes: bool) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    for record in RECORDS:
        trace.observe(record)
    if closes:
        trace.close()
    events = json.loads((tmp_path / "trace.json").read_text() + "]")
    slices = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [("rollout", 1, 10_000_000, 250_000), ("train", 2, 10_250_000, 250_000)]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"worker 0", "worker 1"}


def test_a_checkpoint_appears_whole_and_the_best_outlives_pruning(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.partial(step).mkdir(parents=True)
        write_atomic(folder.partial(step) / "state.json", b"{}")
        assert folder.latest() != folder.checkpoint(step)
        commit_folder(folder.partial(step), folder.checkpoint(step))
        if step == 1:
            point_link(folder.best, folder.checkpoint(step))
    assert not prune(folder, keep=2)
    assert folder.steps() == [1, 3, 4]
    assert folder.best.resolve() == folder.checkpoint(1).resolve()
    assert not list(folder.checkpoints.glob(".partial*"))


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    with exclusive(RunFolder(tmp_path)), pytest.raises(BlockingIOError), exclusive(RunFolder(tmp_path)):
        pass
    with exclusive(RunFolder(tmp_path)):
        pass


def test_a_trace_that_is_full_is_kept_beside_a_new_one_and_both_open(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    written = [Span(step % 2, "train", step, float(step), step + 0.5) for step in range(400)]
    for first in (0, 130, 290):  # the run is resumed twice
        trace = TraceFile(path, most_bytes=10_000)
        for span in written[first : {0: 130, 130: 290, 290: 400}[first]]:
            trace.observe(span)
        trace.close()
    old = json.loads((tmp_path / "trace.1.json").read_text())
    new = json.loads(path.read_text() + "]")
    assert max(path.stat().st_size, (tmp_path / "trace.1.json").stat().st_size) < 11_000
    assert sorted(tmp_path.iterdir()) == [tmp_path / "trace.1.json", path]
    steps = [event["args"]["step"] for event in (*old, *new) if event["ph"] == "X"]
    assert steps == list(range(400 - len(steps), 400))
    for events in (old, new):
        named = {event["tid"] for event in events if event["ph"] == "M"}
        assert {event["tid"] for event in events} == named, "every row of each file has a name"


@pytest.mark.parametrize("left", [1, 2, 30])
def test_a_trace_that_was_cut_while_it_was_rotated_goes_on(tmp_path: Path, left: int) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    for step in range(left):
        trace.observe(Span(0, "train", step, float(step), step + 0.5))
    trace.close()
    with path.open("a") as file:
        file.write("]")
    trace = TraceFile(path)
    trace.observe(Span(0, "train", left, float(left), left + 0.5))
    trace.close()
    events = json.loads(path.read_text() + "]")
    assert [event["args"]["step"] for event in events if event["ph"] == "X"][-1] == left


def test_full_transcripts_make_room_and_metrics_are_never_dropped(tmp_path: Path) -> None:
    transcripts, metrics = tmp_path / "transcripts.jsonl", tmp_path / "metrics.jsonl"
    observers = (TranscriptsFile(transcripts, most_bytes=5_000), MetricsFile(metrics))
    for step in range(1_000):
        for observer in observers:
            observer.observe(Transcript(step, "sample" * 10))
            observer.observe(StepRecord(step, 0.5, {"train/loss": 1.5}))
    assert len(metrics.read_text().splitlines()) == 1_000
    lines = [json.loads(line) for path in (older(transcripts), transcripts) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1_000 - len(lines), 1_000))
    assert 5_000 < older(transcripts).stat().st_size < 5_200


def test_a_full_log_is_kept_once_and_its_writers_write_on(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(50):
        os.write(out, f"line {number}\n".encode())
        assert limit_log(path, 100) == (path.stat().st_size == 0)
    os.close(out)
    assert stat.S_IMODE(older(path).stat().st_mode) == 0o600
    assert older(path).stat().st_size + path.stat().st_size < 300
    assert WorkerHandle(0, 1, str(path)).last_lines(8).splitlines() == [f"line {number}" for number in range(42, 50)]
    assert not limit_log(tmp_path / "none.log", 100)


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
@pytest.mark.parametrize("parents", [False, True], ids=["new parents", "parents there"])
def test_a_run_directory_and_its_texts_are_its_owners_alone(tmp_path: Path, umask: int, parents: bool) -> None:
    folder = RunFolder(tmp_path / "runs" / "of mine" / "run")
    if parents:
        folder.root.parent.mkdir(parents=True)
    before = os.umask(umask)
    try:
        with exclusive(folder):
            TranscriptsFile(folder.transcripts).observe(Transcript(0, "secret"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.transcripts.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.root.parent.stat().st_mode) == 0o777 & ~umask or parents


def test_a_run_directory_that_was_made_for_others_stays_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with exclusive(RunFolder(tmp_path)):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_queue_seconds_runs_from_the_last_producer() -> None:
    from realgraph.graphs.graph import Edge, Graph

    edges = (Edge("a", "c"), Edge("b", "c"), Edge("c", "a", role="actor", distance=1))
    graph = Graph("g", {}, {}, {}, {}, {}, edges, 1)
    spans = {"a": CallSpan(0.0, 1.0), "b": CallSpan(0.0, 2.0), "c": CallSpan(2.5, 3.0)}
    assert queue_seconds("c", spans, graph) == 0.5
    assert queue_seconds("a", spans, graph) == 0.0


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(OutputSpec(tensorboard=True), tmp_path, "p", {})
    for record in RECORDS:
        tracker.observe(record)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"reward/reward", "train/loss", "eval/accuracy", "step_seconds"} <= set(events.Tags()["scalars"])


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outputs\.trackers.*'mlflow'"):
        make_trackers(OutputSpec(trackers=("mlflow",)), tmp_path, "p", {})


def test_plain_lines_say_what_happened() -> None:
    out = io.StringIO()
    screen = PlainLines(Terminal(file=out, width=200), every_seconds=0)
    for record in RECORDS:
        screen.observe(record)
    text = out.getvalue()
    for part in ("/runs/x", "step 1", "reward 0.25", "accuracy 0.5", "careful [not markup]", "finished"):
        assert part in text


def test_live_screen_shows_calls_and_curve() -> None:
    out = io.StringIO()
    screen = LiveScreen(Terminal(file=out, width=120, force_terminal=True))
    for record in RECORDS:
        screen.observe(record)
    screen.close()
    for part in ("realgraph: grpo", "rollout", "train", "accuracy 0.5", "careful [not markup]"):
        assert part in out.getvalue()


def rows(records: Sequence[RunRecord], width: int = 80) -> dict[str, str]:
    """The rows of the last table that a live screen draws of these, without bars and frames, by their first word."""
    out = io.StringIO()
    screen = LiveScreen(Terminal(file=out, width=width, force_terminal=True))
    for record in records:
        screen.observe(record)
    screen.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    lines = [re.sub(r"[│━╸╺ ]+", " ", line).strip() for line in plain.splitlines() if line.startswith("│")]
    return {line.partition(" ")[0]: line for line in lines}


@pytest.mark.parametrize("width", [64, 80, 120])
def test_a_live_screen_has_the_plans_seconds_beside_the_median_of_the_measured_ones(width: int) -> None:
    planned = PlannedSeconds(2.4, {"rollout": 0.25, "train": 0.6, "reallocate": 0.012})
    start = msgspec.structs.replace(STARTED, calls=("rollout", "reward", "train"), planned=planned)
    found = rows([start], width)
    assert "reward" not in found  # nothing is planned of it, and nothing measured
    assert [found[name] for name in ("a", "rollout", "train")] == [
        *("a whole step 2.40 s", "rollout 0.250 s", "train 0.600 s")
    ]
    taken = {"rollout/seconds": 0.5, "reward/seconds": 0.02, "train/seconds": 0.4, "reallocate/seconds": 0.012}
    slow = {name: 10 * seconds for name, seconds in taken.items()}  # the first step warms up
    found = rows([start, StepRecord(0, 10.0, slow), StepRecord(1, 1.0, taken), StepRecord(2, 1.0, taken)], width)
    assert found["call"] == "call predicted measured ratio share of the step"
    assert [found[name] for name in ("a", "rollout", "reward", "train", "reallocate")] == [
        "a whole step 2.40 s 1.00 s 2.40",
        "rollout 0.250 s 0.500 s 0.50",
        "reward 20.0 ms",
        "train 0.600 s 0.400 s 1.50",
        "reallocate 12.0 ms 12.0 ms 1.00",
    ]


def test_a_live_screen_without_predictions_shows_what_was_measured() -> None:
    """A plan by hand may have none."""
    found = rows(RECORDS)
    assert [found[name] for name in ("a", "rollout", "train")] == [
        *("a whole step 0.500 s", "rollout 0.200 s", "train 0.300 s")
    ]


def test_a_start_on_record_has_the_plans_seconds_and_older_records_have_none(tmp_path: Path) -> None:
    planned = PlannedSeconds(2.4, {"rollout": 0.25})
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.observe(msgspec.structs.replace(STARTED, planned=planned))
    file.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("planned") == {"step": 2.4, "calls": {"rollout": 0.25}}
    assert msgspec.convert(line, RunRecord) == STARTED


@pytest.mark.parametrize("moved", [{}, {"rollout": 0.2}, {"rollout": 0.2, "ref": 0.3}])
def test_a_steps_metrics_have_planned_seconds_beside_each_measured_one(moved: dict[str, float]) -> None:
    """A plan with several reallocations predicts none of what a step measures as one; functions have none either."""
    job = job_of(Shape("grpo"))
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, reallocation_seconds=moved))
    expected = {name: allocation.seconds for name, allocation in job.plan.allocations.items()}
    expected |= {"reallocate": 0.2} if len(moved) == 1 else {}
    spans = {name: CallSpan(10.0, 10.5) for name in (*job.graph.calls, *(["reallocate"] if moved else []))}
    ended = StepEnded(0, {}, spans, 1, 1, 2, 1, 0, 0, 0, 0, Mean(0.0, 1.0), 0, {}, ())
    metrics = flatten(ended, job.graph, job.plan)
    assert {name: metrics[f"{name}/seconds"] for name in spans} == dict.fromkeys(spans, 0.5)
    endings = [name.rpartition("/") for name in metrics if name.endswith("/planned_seconds")]
    assert {name: metrics[f"{name}/planned_seconds"] for name, _, _ in endings} == expected
    assert planned_of(job) == PlannedSeconds(job.plan.period_seconds, expected)


def test_the_last_lines_have_planned_seconds_beside_the_median_of_the_measured_ones() -> None:
    steps = [StepRecord(i, seconds, {"train/seconds": seconds / 2}) for i, seconds in enumerate((1.0, 5.0, 2.0))]
    planned = PlannedSeconds(2.4, {"rollout": 0.25, "train": 0.6})
    assert list(seconds_lines(planned, steps)) == [
        "  median time: a whole step 2.00 s (2.40 s planned), train 1.00 s (0.600 s planned)"
    ]
    assert list(seconds_lines(msgspec.structs.replace(planned, step=0.0), steps)) == [
        "  median time: train 1.00 s (0.600 s planned)"
    ]
    assert not [*seconds_lines(planned, []), *seconds_lines(PlannedSeconds(), steps)]


def test_the_period_is_not_predicted_of_rollouts_alone() -> None:
    """It is that of the step with its training."""
    job = job_of(Shape("grpo"))
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, period_seconds=3.0))
    assert planned_of(job).step == 3.0
    assert planned_of(msgspec.structs.replace(job, rollout_alone=True)) == PlannedSeconds(0.0, planned_of(job).calls)


@given(st.lists(st.floats(-1e3, 1e3), max_size=300))
def test_sparkline_has_a_mark_per_window(values: list[float]) -> None:
    line = sparkline(values, width=40)
    assert len(line) == min(40, len(values))
    if values and max(values) > min(values) and len(values) <= 40:
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


def test_a_step_is_summed_up_whatever_its_calls_are_called() -> None:
    metrics = {"mark/reward": 0.25, "learn/loss": 1.5, "learn/grad_norm": 2.0, "sample/new_tokens": 7.0}
    assert summary(StepRecord(0, 0.5, metrics)) == "step 1  0.50 s  reward 0.25  loss 1.5  grad norm 2  new tokens 7"
    critic = {"train_actor/loss": 1.0, "train_critic/loss": 3.0, "score/reward": 0.5}
    assert summary(StepRecord(0, 0.5, critic)) == "step 1  0.50 s  reward 0.5  loss 1  value loss 3"
    debate = {"pro_train/loss": 1.5, "con_train/loss": -0.5, "first/new_tokens": 7.0, "batch/new_tokens": 70.0}
    text = "step 1  0.50 s  loss pro_train 1.5, con_train -0.5  new tokens 7"
    assert summary(StepRecord(0, 0.5, debate)) == text


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of a process's peak is reset on Linux alone")
def test_pages_of_files_such_as_code_are_no_part_of_a_peak(tmp_path: Path) -> None:
    memory, size = DeviceMemory(torch.device("cpu")), 96_000_000
    file = tmp_path / "library"
    file.write_bytes(bytes(size))
    before = memory.peak()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        during = memory.peak()
    assert before is not None and during is not None
    assert during - before < 0.1 * size


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of a process's peak is reset on Linux alone")
def test_the_peak_of_a_call_is_its_own() -> None:
    memory, size = DeviceMemory(torch.device("cpu")), 96_000_000
    memory.begin()
    before = memory.peak()
    taken = torch.ones(size, dtype=torch.uint8)
    during = memory.peak()
    del taken
    memory.begin()
    after = memory.peak()
    assert before is not None and during is not None and after is not None
    assert during - before > 0.9 * size
    assert during - after > 0.9 * size
    assert memory.most() > 0.9 * during  # the kernel counts in batches
