"""Options of `realgraph plan`: cluster sizes, a run directory to compare with, Ctrl-C, and the dispatch of commands."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.plan.lengths import read_lengths
from realgraph.plan.limits import Progress, interruptible
from realgraph.plan.options import sizes_of
from realgraph.plan.view.measured import measured_calls, read_run
from realgraph.planner.plan.codec import plan_to_json
from realgraph.planner.report.format import WHOLE_STEP
from realgraph.planner.request.cost_table import CostTable, costs_to_json
from realgraph.run.costs_record import steady
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.observer import RunEnded, RunStarted, StepRecord
from realgraph.runtime.master.records import MetricsFile
from realgraph.screen.terminal import Terminal
from tests.console_script import typed
from tests.plan_reports import overlapping


@pytest.mark.parametrize(
    ("text", "per_node", "sizes"),
    [
        ("8..1024", 8, (8, 16, 32, 64, 128, 256, 512, 1024)),
        ("8..96", 8, (8, 16, 32, 64, 96)),
        ("24..24", 8, (24,)),
        ("96,8,24", 8, (8, 24, 96)),
        ("4..16", 8, (4, 8, 16)),
    ],
)
def test_sizes_are_doubled_or_listed(text: str, per_node: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of(text, per_node) == sizes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eight", "names no sizes"),
        ("64..8", "names no sizes"),
        ("", "names no sizes"),
        ("12,16", "12 devices are no whole nodes of 8"),
        ("0,8", "not 0"),
        ("8..1000000", "65,536"),
    ],
)
def test_sizes_that_no_cluster_has_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sizes_of(text, 8)


def test_the_first_interrupt_asks_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_progress_is_shown_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(Terminal(file=sys.stderr, force_terminal=False))
    progress.report(float("inf"), 3.0)
    assert progress.text == "no plan yet, bound 3.00 s (Ctrl-C takes it)"
    progress.report(4.0, 3.2)
    assert progress.text == "best so far 4.00 s, bound 3.20 s, gap 25 % (Ctrl-C takes it)"
    progress.close()
    assert capsys.readouterr().err == ""


def test_a_runs_steps_are_compared_without_its_first_ones(tmp_path: Path) -> None:
    rng, (_, plan) = random.Random(1), overlapping()
    folder = RunFolder(tmp_path)
    folder.plan.write_text(plan_to_json(plan))
    metrics = MetricsFile(folder.metrics)
    for first in (0, 6):  # the second start repeats two steps that the first did not save
        metrics.observe(RunStarted("run", "ppo", 12, first, str(tmp_path), tuple(plan.allocations)))
        for step in range(first, first + 8):
            slow = 100.0 if step - first < 2 else 1.0
            taken = {f"{name}/seconds": 2 * a.seconds * slow for name, a in plan.allocations.items()}
            (moved,) = plan.reallocation_seconds.values()
            taken["reallocate/seconds"] = 3 * moved * slow
            metrics.observe(StepRecord(step, plan.period_seconds * slow * rng.uniform(1.09, 1.11), taken))
    metrics.observe(RunEnded(14, "finished", True))
    metrics.close()
    found = {one.call: one for one in measured_calls(read_run(tmp_path))}
    assert set(found) == {WHOLE_STEP, *plan.allocations, "reallocate"}
    assert found[WHOLE_STEP].measured_seconds == pytest.approx(1.1 * plan.period_seconds, rel=0.02)
    assert found["generate"].measured_seconds == pytest.approx(2 * found["generate"].predicted_seconds)
    assert found["generate"].spread == 0 and found["generate"].count == 10
    assert found["reallocate"].measured_seconds == pytest.approx(3 * found["reallocate"].predicted_seconds)


@pytest.mark.parametrize(("ran", "count"), [((2,), 1), ((6,), 5), ((7,), 5), ((1, 3), 2), ((8, 8), 12)])
def test_a_plan_and_the_next_ones_costs_leave_out_the_same_steps(
    ran: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    """The first steps of each start are left out, as `costs.json` does."""
    _, plan = overlapping()
    folder, first = RunFolder(tmp_path), 0
    folder.plan.write_text(plan_to_json(plan))
    metrics = MetricsFile(folder.metrics)
    kept: list[StepRecord] = []
    for n_steps in ran:
        metrics.observe(RunStarted("run", "ppo", sum(ran), first, str(tmp_path), tuple(plan.allocations)))
        steps = [StepRecord(step, 1.0, {}) for step in range(first, first + n_steps)]
        for step in steps:
            metrics.observe(step)
        kept, first = [*kept, *steady(steps)], first + n_steps
    metrics.close()
    assert read_run(tmp_path).steps == tuple(kept)
    assert len(kept) == count


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run can be read here"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "plan.json").write_text(plan_to_json(overlapping()[1]))
    (tmp_path / "metrics.jsonl").write_text('{"type": "step"\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:1: .*no record of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"finished no step$"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"type": "step", "step": 0, "seconds": 1.0, "metrics": {}}\n')
    with pytest.raises(ConfigError, match="no step after its first, which warms up"):
        read_run(tmp_path)


def test_two_plan_files_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plan = overlapping()
    text = plan_to_json(plan)
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(text.replace('"microbatches": 32', '"microbatches": 16'))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert typed("plan", "diff", *files, monkeypatch=monkeypatch) == 0
    assert "32 x 16,384 tokens" in capsys.readouterr().out
    assert typed("plan", "diff", *files, "--json", monkeypatch=monkeypatch) == 0
    (change,) = json.loads(capsys.readouterr().out)
    assert (change["subject"], change["what"]) == ("critic_train", "micro-batches")
    assert typed("plan", "diff", files[0], files[0], monkeypatch=monkeypatch) == 0
    assert "no difference" in capsys.readouterr().out
    for words, says in (
        (["x.yaml", "--target", "3"], "add --devices"),
        (["diff", files[0]], "missing"),
        ([], "which run?"),
        (["diff", *files, "x"], "unexpected"),
    ):
        assert typed("plan", *words, monkeypatch=monkeypatch) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[80, 512, 3.0]", "80\n512\n\n3\n"])
def test_lengths_are_a_list_or_lines(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    assert read_lengths(file) == (80, 512, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("80\nmany\n", r"lengths:2: .*'many' is no number"),
        ("80\n-3\n", r"lengths:2: .*-3 is no length"),
        ("80\nnan\n", r"lengths:2: .*nan is no length"),
        ("80\n0\n", r"lengths:2: .*0 is no length"),
        ("80\n3.4\n", r"lengths:2: .*3.4 is no length"),
        ("[80, 0]", r"\$\[1\]: 0 is no length"),
        ("[80, 3.4]", r"\$\[1\]: 3.4 is no length"),
        ('["a"]', "no JSON list of numbers"),
        ("[]", "expected 1 to"),
        ("", "expected 1 to"),
    ],
)
def test_what_is_no_length_is_told(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_lengths(file)
    with pytest.raises(ConfigError, match="can't be read"):
        read_lengths(tmp_path / "nowhere")


def test_the_lengths_of_a_run_are_those_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes(costs_to_json(CostTable(lengths=(3, 5, 9))))
    assert read_lengths(tmp_path) == (3, 5, 9)
    (tmp_path / "costs.json").write_bytes(costs_to_json(CostTable()))
    with pytest.raises(ConfigError, match="recorded no lengths"):
        read_lengths(tmp_path)
