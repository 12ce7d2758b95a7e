"""The page about a run: its numbers are those of the run's files, whatever state these are in."""

import re
import shutil
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.planner.report.format import rate_text, seconds_text
from realgraph.report.command import report_command
from realgraph.report.curves import MOST_POINTS, curve_svg, curves_of
from realgraph.report.history import RunHistory, Slice, read_history
from realgraph.report.page import page
from realgraph.report.timelines import measured_timeline, timelines
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.observer import StepRecord, Transcript
from realgraph.runtime.master.records import TranscriptsFile
from tests.runs import BASE, GRPO, finish, home, records, write_run

__all__ = ["home"]

HEAD = re.compile("<h2>(.*?)</h2>")
SAMPLE = "<b>17+25</b>=42 & more"


@pytest.fixture(scope="module")
def root(home: Path) -> Path:
    """A finished run of six steps, evaluated after each second one."""
    evaluated = {"steps": 6, "eval": {"every": 2, "data": {**BASE["data"], "path": "test.jsonl"}}}
    run = write_run(home, "reported", GRPO, evaluated)
    finish(home, "run", str(run), name="reported")
    return home / "reported"


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> RunFolder:
    """The run's directory, to be broken."""
    return RunFolder(Path(shutil.copytree(root, tmp_path / "run", symlinks=True)))


def test_the_page_has_the_runs_own_numbers(root: Path, tmp_path: Path) -> None:
    history = read_history(root)
    file = report_command(root, tmp_path / "page.html")
    text = file.read_text()
    assert HEAD.findall(text) == [
        *("How it went", "Evaluations", "Predicted against measured", "Timeline: two steps", "Memory"),
        *("Samples of training", "Samples of evaluations", "All metrics"),
    ]
    steps = records(root)
    assert "<b>6</b><span>of 6 steps done</span>" in text and "<dt>state</dt><dd>finished</dd>" in text
    assert len(history.steady) == 5  # the first one warms up
    assert f"<b>{seconds_text(median(step['seconds'] for step in steps[1:]))}</b><span>a step, median" in text
    for call in history.job.plan.allocations:
        assert (
            f"<title>{call}, predicted" in text and f"<title>{call}, measured" in text and f'data-call="{call}"' in text
        )
    for name, value in steps[-1]["metrics"].items():
        assert name in text, (name, value)
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")


def test_bars_are_the_slices_of_two_steps(root: Path) -> None:
    """Busy seconds of a lane are those of its worker in the window, each second once."""
    history = read_history(root)
    planned, measured = timelines(history)
    assert planned is not None and measured is not None
    assert planned.window_seconds == measured.window_seconds >= 2 * planned.period_seconds
    assert [lane.devices for lane in measured.lanes] == [(worker,) for worker in range(len(measured.lanes))]
    own = measured_timeline(history)
    assert own is not None
    begins = {step.time - step.seconds: step.seconds for step in history.steps}
    matching = [
        begin
        for begin in begins
        if _busy(history, 0, begin, own.window_seconds)
        == pytest.approx(2 * own.lanes[0].busy_seconds, abs=2e-3 * own.window_seconds)
    ]
    assert matching
    for lane in own.lanes:
        assert lane.bars and all(0 <= bar.start <= bar.end <= own.window_seconds + 1e-6 for bar in lane.bars)
        if begins[matching[0]] < own.window_seconds:  # a step that is disturbed may take longer than two
            assert {bar.kind for bar in lane.bars} >= {"generate", "train"}


def _busy(history: RunHistory, worker: int, begin: float, window: float) -> float:
    """On a grid of a ten-thousandth."""
    moments = [begin + window * (i + 0.5) / 10_000 for i in range(10_000)]
    slices = [one for one in history.slices if one.worker == worker]
    return window * sum(any(one.started <= moment < one.ended for one in slices) for moment in moments) / 10_000


@pytest.mark.parametrize("left", ["all", "no trace", "no steps", "one step", "nothing but the job", "cut off"])
def test_whatever_a_run_has_left_is_shown(copy: RunFolder, left: str) -> None:
    lines = copy.metrics.read_bytes().splitlines(keepends=True)
    match left:
        case "no trace":
            copy.trace.unlink()
        case "no steps":
            copy.metrics.write_bytes(lines[0])
        case "one step":
            copy.metrics.write_bytes(b"".join(lines[:3]))
        case "nothing but the job":
            for file in (copy.metrics, copy.trace, copy.transcripts):
                file.unlink()
        case "cut off":
            for file in (copy.trace, copy.transcripts):
                file.write_bytes(file.read_bytes()[:-20])
            copy.metrics.write_bytes(copy.metrics.read_bytes() + lines[1][:-9])
    text = report_command(copy.root).read_text()
    heads = HEAD.findall(text)
    assert ("How it went" in heads) == (left not in ("no steps", "one step", "nothing but the job"))
    assert ("Timeline: two steps" in heads) == (left in ("all", "cut off", "one step"))
    assert ("it has not ended" in text) == (left in ("no steps", "one step", "nothing but the job"))


def test_what_samples_say_is_text(copy: RunFolder) -> None:
    file = TranscriptsFile(copy.transcripts)
    file.observe(Transcript(5, SAMPLE))
    file.close()
    text = report_command(copy.root).read_text()
    assert "&lt;b&gt;17+25&lt;/b&gt;=42 &amp; more" in text and SAMPLE not in text


def test_what_is_no_run_is_refused_with_its_place(copy: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is not a run directory: it has no job\.json"):
        report_command(tmp_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        report_command(copy.root, tmp_path / "none" / "page.html")
    with copy.metrics.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:\d+: .*no record of a run"):
        report_command(copy.root)


def test_trained_tokens_are_those_of_all_samples_that_are_trained_on(copy: RunFolder, tmp_path: Path) -> None:
    def doubled(match: re.Match[str]) -> str:
        return f'"batch/trained_tokens":{2 * float(match[1])}'

    text = copy.metrics.read_text()
    assert "batch/trained_tokens" in text
    copy.metrics.write_text(re.sub(r'"batch/trained_tokens":\s*([\d.]+)', doubled, text))
    steps = records(copy.root)[1:]
    a_second = sum(step["metrics"]["batch/trained_tokens"] for step in steps) / sum(step["seconds"] for step in steps)
    assert all(step["metrics"]["batch/trained_tokens"] == 2 * step["metrics"]["batch/tokens"] for step in steps)
    page_text = report_command(copy.root, tmp_path / "page.html").read_text()
    assert f"<b>{rate_text(a_second)}</b><span>trained tokens a second" in page_text


@given(st.integers(1, 3 * MOST_POINTS), st.floats(-1e9, 1e9), st.booleans())
def test_a_curve_of_any_length_keeps_its_mean_its_last_step_and_its_picture(n: int, slope: float, odd: bool) -> None:
    steps = [
        StepRecord(i, 1.0, {"train/loss": slope * i, "odd": float("nan")} if odd else {"train/loss": slope * i})
        for i in range(n)
    ]
    curves = curves_of(steps)
    curve = curves["train/loss"]
    assert "odd" not in curves
    assert len(curve.points) == min(n, MOST_POINTS) and curve.points[-1][0] == n - 1
    if n <= MOST_POINTS:
        assert curve.last == slope * (n - 1)
    picture = curve_svg(curve)
    (line,) = re.findall(r'points="(.*?)"', picture)
    across = [float(point.partition(",")[0]) for point in line.split()]
    assert across == sorted(across) and all(0 <= x <= 330 for x in across)


def test_slices_of_one_call_that_follow_each_other_are_one_bar(root: Path) -> None:
    history = read_history(root)
    first = history.steady[1]
    begin = first.time - first.seconds
    pieces = tuple(Slice(0, "rollout", 1, begin + i * 1e-4, begin + (i + 1) * 1e-4) for i in range(100))
    ends = (Slice(0, "train", 1, begin - 1, begin - 0.9), Slice(0, "train", 9, begin + 9, begin + 9.1))
    shown = measured_timeline(msgspec.structs.replace(history, slices=(*pieces, *ends), steady=(first, first)))
    assert shown is not None
    assert [bar.task for bar in shown.lanes[0].bars].count("rollout") == 1
    assert page(history)
