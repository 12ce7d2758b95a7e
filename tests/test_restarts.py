"""Runs that go on by themselves after a lost worker or host: on the same hosts, a spare one, or fewer."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import own
from tests.host_runs import Hosts
from tests.runs import GRPO, Special, finish, home, numbers, records, start, write_run
from tests.traces import processes_at, title_of

__all__ = ["home", "own"]

STEPS = 16
SOON = Special(limits={"realgraph.run.restarts.BACK_OFF_SECONDS": 0.5})
RESTARTS: dict[str, Any] = {"runtime": {"restarts": 1}, "steps": STEPS, "launch": {"join_seconds": 60}}


def starts(home: Path) -> list[int]:
    """The restarts before each start of the run."""
    lines = map(json.loads, (home / "run/metrics.jsonl").read_text().splitlines())
    return [line["restarts"] for line in lines if line["type"] == "start"]


def equal_to(expected: dict[int, dict[str, float]], found: dict[int, dict[str, float]], steps: int) -> None:
    assert found.keys() == set(range(steps))
    for step in range(steps):
        assert found[step]["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-3, abs=1e-5), step


@pytest.mark.slow
def test_a_run_of_hosts_goes_on_by_itself_after_a_lost_worker(own: Path) -> None:
    running = Hosts(own, RESTARTS, special=SOON)
    running.at_step(3)
    os.kill(next(pid for pid in processes_at(own) if title_of(pid) == "realgraph worker 3"), signal.SIGKILL)
    output = running.ends(0, 120)
    assert re.search(r"restart 1 of 1 \(runtime.restarts\) in 0.5 s, from .*step-", output), output
    assert starts(own) == [0, 1]
    finish(own, "run", str(write_run(own, "one", GRPO, {"steps": STEPS, "cluster": {"devices": 4}})), name="one")
    equal_to(numbers(own / "one"), numbers(own / "run"), STEPS)


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_that_is_gone(own: Path) -> None:
    running = Hosts(own, RESTARTS, names="abc", special=SOON).at_step(3)
    joined = re.findall(r"host (.) \(127.0.0.1\) has joined", running.running.output())
    running.agents[joined[0]].process.kill()
    output = running.ends(0, 120)
    assert "to spare" in output
    assert starts(own) == [0, 1]
    assert set(numbers(own / "run")) == set(range(STEPS))


@pytest.mark.slow
def test_a_run_goes_on_by_itself_on_fewer_hosts(own: Path) -> None:
    running = Hosts(own, RESTARTS, special=SOON).at_step(3)
    running.agents["b"].process.kill()
    output = running.ends(0, 120)
    assert starts(own) == [0, 1], output
    assert json.loads((own / "run/job.json").read_text())["cluster"]["nodes"] == 1
    assert set(numbers(own / "run")) == set(range(STEPS))


@pytest.mark.slow
def test_restarts_are_counted_and_end(own: Path) -> None:
    running = Hosts(own, RESTARTS, {"steps": 100_000}, special=SOON).at_step(3)
    for restart in (0, 1):
        victims = [pid for pid in processes_at(own) if title_of(pid) == "realgraph worker 0"]
        os.kill(victims[0], signal.SIGKILL)
        if not restart:
            running.running.until(lambda: len(starts(own)) == 2, "the restart")
            running.at_step(len(records(own / "run")) + 3)
            assert "it has restarted by itself 1 time (" in finish(own, "status", str(own / "run")).output()
    running.ends(3, 60)
    assert starts(own) == [0, 1]


@pytest.mark.slow
def test_a_run_of_one_host_goes_on_by_itself(own: Path) -> None:
    file = write_run(own, "run", GRPO, {"runtime": {"restarts": 2}, "steps": STEPS})
    running = start(own, "run", str(file), special=SOON)
    running.until_step(3)
    os.kill(next(pid for pid in processes_at(own) if title_of(pid) == "realgraph worker 1"), signal.SIGKILL)
    assert running.wait(90) == 0, running.output()
    assert starts(own) == [0, 1]
    finish(own, "run", str(write_run(own, "one", GRPO, {"steps": STEPS})), name="one")
    assert numbers(own / "run") == numbers(own / "one"), "the same plan gives the same bits"


def test_an_interrupt_between_two_starts_ends_the_run(own: Path) -> None:
    running = start(own, "run", str(write_run(own, "run", GRPO, {"runtime": {"restarts": 2}, "steps": STEPS})))
    running.until_step(3)
    os.kill(next(pid for pid in processes_at(own) if title_of(pid) == "realgraph worker 1"), signal.SIGKILL)
    running.until(lambda: "restart 1 of 2" in running.output(), "the restart")
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(20) == 130, running.output()
    assert starts(own) == [0]
    assert "realgraph run --resume" in running.output()
