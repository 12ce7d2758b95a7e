"""Runs under a real Slurm of two nodes: by srun in an allocation, as a submitted job, over its time limit and back."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realgraph.runtime.clusters.sbatch import BatchScript
from tests.broken_runs import LONG, own
from tests.namespaces import network, why_not
from tests.runs import GRPO, finish, home, numbers, records, write_run
from tests.slurm_cluster import Slurm, root_of_slurm, slurm
from tests.traces import processes_at, title_of, traces

__all__ = ["home", "own"]

REASON = why_not() or ("" if root_of_slurm().exists() else "no Slurm is unpacked: make test-hosts fetches it")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SLURM: dict[str, Any] = {"launch": {"kind": "slurm", "join_seconds": 60}, "steps": 4}
REALGRAPH = (sys.executable, "-m", "realgraph")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with network(2) as made, slurm(made, tmp_path_factory.mktemp("cluster") / "slurm") as running:
        yield running


def allocated(cluster: Slurm, folder: Path, *words: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    """`realgraph WORDS` inside an allocation of its own."""
    return cluster.call("salloc", f"--nodes={nodes}", "--quiet", *REALGRAPH, *words, cwd=folder)


def written(folder: Path, *parts: dict[str, Any], nodes: int | None = 2) -> str:
    devices = {"cluster": {"devices": 2, "nodes": nodes}}
    return str(write_run(folder, "run", GRPO, devices, SLURM, *parts))


def same_as_one_host(own: Path, home: Path) -> None:
    one = {"cluster": {"devices": 4, "nodes": 1}, "steps": 4}
    finish(own, "run", str(write_run(own, "one", GRPO, one)), name="one")
    found, expected = numbers(own / "run"), numbers(own / "one")
    assert found.keys() == expected.keys() == set(range(4))
    for step, metrics in expected.items():
        assert found[step]["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3, abs=1e-5)
        assert found[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-3)


def test_the_nodes_of_an_allocation_are_checked_before_a_run(cluster: Slurm, tmp_path: Path) -> None:
    done = allocated(cluster, tmp_path, "doctor", "--slurm", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [host["name"] for host in report["hosts"]] == ["n0", "n1"]
    (pair,) = report["pairs"]
    assert pair["error"] == "" and min(pair["there_bytes_per_s"], pair["back_bytes_per_s"]) > 0.13e9


def test_the_nodes_of_an_allocation_are_taken_and_train_as_one_host(cluster: Slurm, own: Path, home: Path) -> None:
    """The number of nodes and their memory are not in the run file."""
    done = allocated(cluster, own, "run", written(own, nodes=None))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host n0" in done.stdout and "host n1" in done.stdout
    plan = json.loads((own / "run/job.json").read_text())["cluster"]
    assert (plan["nodes"], plan["devices_per_node"], plan["kind"]) == (2, 2, "cpu")
    same_as_one_host(own, home)
    traces(own).gone(20)


def test_a_submitted_run_that_its_time_limit_ends_comes_back_and_goes_on(cluster: Slurm, own: Path, home: Path) -> None:
    """Slurm's limit is changed while the job runs, as a minute is the least there is: two where most of that is over,
    as the warning comes 50 s before the end, and Slurm looks at limits every 30 s."""
    launch = {"launch": {"save_seconds": 50, "options": {"time": "5"}}}
    file = written(own, LONG, launch)
    shown = cluster.call(*REALGRAPH, "run", file, "--submit", "--dry-run", cwd=own)
    assert shown.returncode == 0, shown.stderr
    assert not (own / "run").exists()
    assert {"#SBATCH --nodes=2", "#SBATCH --signal=B:TERM@50", "#SBATCH --time=5"} <= set(shown.stdout.splitlines())
    assert "--no-kill" not in shown.stdout
    restarts = cluster.call(*REALGRAPH, "run", file, "runtime.restarts=1", "--submit", "--dry-run", cwd=own)
    assert "#SBATCH --no-kill\n" in restarts.stdout, "a failed node does not end the job of a run that may restart"
    submitted = time.monotonic()
    done = cluster.call(*REALGRAPH, "run", file, "--submit", cwd=own)
    assert done.returncode == 0, done.stderr
    job = re.search(r"submitted as job (\d+)", done.stdout)
    assert job is not None
    log = own / f"run/slurm-{job[1]}.log"
    assert str(log) in done.stdout.replace("\n", "")
    _until(lambda: len(numbers(own / "run")) > 1, 120, log)
    minutes = 1 if time.monotonic() - submitted < 20 else 2
    assert cluster.call("scontrol", "update", f"JobId={job[1]}", f"TimeLimit={minutes}").returncode == 0
    _until(lambda: "goes back into the queue" in log.read_text(), 90 + 60 * minutes, log)
    before = len(numbers(own / "run"))
    assert before > 1
    cluster.call("scontrol", "update", f"JobId={job[1]}", "TimeLimit=5")
    _until(lambda: len(numbers(own / "run")) > before + 1, 90, log)
    assert cluster.until(job[1], ["RUNNING"], 10)["Restarts"] == "1"
    cluster.call("scancel", "--full", job[1])
    cluster.until(job[1], ["CANCELLED", "COMPLETED", "FAILED"], 60)
    traces(own).gone(30)
    assert log.read_text().count("goes back into the queue") == 1
    steps = [
        json.loads(line)["step"] for line in (own / "run/metrics.jsonl").read_text().splitlines() if "loss" in line
    ]
    assert steps == sorted(set(steps)), "no step is trained twice"


def test_a_script_in_a_folder_of_any_name_runs_there(cluster: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "it's 100%j #1"
    folder.mkdir()
    file = folder / "run.sbatch"
    file.write_text(BatchScript("a run", folder, folder, ("pwd",), 60, options={"comment": 'a "$HOME" \\'}).text)
    submitted = cluster.call("sbatch", "--parsable", str(file))
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    cluster.until(job, ["COMPLETED"], 30)
    assert (folder / f"slurm-{job}.log").read_text() == f"{folder}\n"


def test_a_job_that_comes_back_before_anything_was_saved_starts_over(cluster: Slurm, own: Path, home: Path) -> None:
    """Slurm counts restarts in the environment of the job; what the first start left is kept aside."""
    file = written(own)
    (own / "run").mkdir()
    (own / "run/job.json").write_text("{}")
    words = ("env", "SLURM_RESTART_COUNT=1", *REALGRAPH, "run", file)
    done = cluster.call("salloc", "--nodes=2", "--quiet", *words, cwd=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (own / "run/before-restart-1/job.json").read_text() == "{}"
    assert set(numbers(own / "run")) == set(range(4))


def test_a_run_goes_on_by_itself_on_the_nodes_that_are_left(cluster: Slurm, own: Path) -> None:
    """First a worker is lost, then the agent of a node."""
    file = written(own, LONG, {"runtime": {"restarts": 2}, "steps": 60}, nodes=None)
    words = ("salloc", "--nodes=2", "--quiet", *REALGRAPH, "run", file)
    with (own / "out").open("w") as out:
        running = subprocess.Popen(cluster.words(*words), env=cluster.environment, cwd=own, stdout=out, stderr=out)
    try:
        for restart, victim in enumerate(("worker", "agent")):
            _until(lambda before=restart: len(records(own / "run", "start")) == before + 1, 60, own / "out")
            done = len(numbers(own / "run"))
            _until(lambda before=done: len(numbers(own / "run")) > before + 2, 90, own / "out")
            os.kill(_processes(own)[victim], signal.SIGKILL)
        assert running.wait(120) == 0, (own / "out").read_text()
    finally:
        running.kill()
        running.wait()
    assert [record["restarts"] for record in records(own / "run", "start")] == [0, 1, 2]
    assert json.loads((own / "run/job.json").read_text())["cluster"]["nodes"] == 1
    assert set(numbers(own / "run")) == set(range(60))
    traces(own).gone(30)


@pytest.mark.parametrize("victim", ["agent", "srun", "worker", "master"])
def test_what_is_killed_ends_the_run_on_all_nodes(cluster: Slurm, own: Path, victim: str) -> None:
    file = written(own, LONG)
    words = ("salloc", "--nodes=2", "--quiet", *REALGRAPH, "run", file)
    with (own / "out").open("w") as out:
        running = subprocess.Popen(cluster.words(*words), env=cluster.environment, cwd=own, stdout=out, stderr=out)
    try:
        _until(lambda: len(numbers(own / "run")) > 1, 90, own / "out")
        found = _processes(own)
        os.kill(found[victim], signal.SIGKILL)
        code = running.wait(90)
        said = (own / "out").read_text()
        if victim != "master":  # of which salloc says nothing
            assert code == 3, said
            assert len(re.findall(r"^error: .*host n[01]", said, re.MULTILINE)) == 1, said
        traces(own).gone(75)
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("smaller", r"run.yaml:\d+.*the plan has 3 nodes, and job \d+ has 2"),
        ("outside", "this shell is in no allocation of Slurm"),
        ("refused", "sbatch refuses the job: .*nowhere"),
        ("nodes", "how many nodes to ask for is not said"),
        ("local", "--submit is for runs that Slurm starts"),
    ],
)
def test_what_slurm_cannot_do_is_said_at_once(cluster: Slurm, own: Path, case: str, wanted: str) -> None:
    match case:
        case "smaller":
            done = allocated(cluster, own, "run", written(own, {"cluster": {"nodes": 3}}))
        case "outside":
            done = cluster.call(*REALGRAPH, "run", written(own), cwd=own)
        case "refused":
            options = {"launch": {"options": {"partition": "nowhere"}}}
            done = cluster.call(*REALGRAPH, "run", written(own, options), "--submit", cwd=own)
        case "nodes":
            done = cluster.call(*REALGRAPH, "run", written(own, nodes=None), "--submit", cwd=own)
        case _:
            done = cluster.call(*REALGRAPH, "run", str(write_run(own, "run", GRPO)), "--submit", cwd=own)
    assert done.returncode == 2, done.stdout
    assert re.search(wanted, " ".join(done.stderr.split())), done.stderr


def _until(holds: Any, seconds: float, log: Path) -> None:
    last = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < last, log.read_text() if log.exists() else "nothing was written"
        time.sleep(0.2)


def _processes(folder: Path) -> dict[str, int]:
    """A process of each kind of the one run of a folder; all hold a file there open but agents, who started those."""
    found: dict[str, int] = {}
    for pid in processes_at(folder):
        for kind, text in {"srun": "srun ", "worker": "realgraph worker ", "master": "realgraph run"}.items():
            if title_of(pid).startswith(text):
                found.setdefault(kind, pid)
    server = int(Path(f"/proc/{found['worker']}/stat").read_text().rpartition(")")[2].split()[1])
    return found | {"agent": int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])}
