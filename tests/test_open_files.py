"""Few open files: the limit is raised where it may be, and named where that is too little."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import GRPO, home, write_run

__all__ = ["home"]

LIMITED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(json.loads(sys.argv[1])))
from realgraph.graphs.errors import ConfigError
from realgraph.runtime.processes.open_files import allow_open_files
try:
    allow_open_files(int(sys.argv[2]))
    print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
except ConfigError as error:
    print(error.problems[0])
"""


def allowed(limits: tuple[int, int], n_workers: int) -> str:
    command = [sys.executable, "-c", LIMITED, json.dumps(limits), str(n_workers)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("limits", "n_workers", "found"),
    [
        ((24, 4096), 2, [1024, 4096]),  # raised as far as a run may want
        ((24, 200), 2, [200, 200]),  # or as far as it goes
        ((256, 4096), 200, [1664, 4096]),  # or as far as it must
        ((2048, 4096), 2, [2048, 4096]),  # never lowered
    ],
)
def test_the_limit_is_raised_where_it_may_be(limits: tuple[int, int], n_workers: int, found: list[int]) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < limits[1]:
        pytest.skip("the limit is lower here")
    assert json.loads(allowed(limits, n_workers)) == found


def test_a_limit_that_is_too_low_is_named(home: Path, tmp_path: Path) -> None:
    said = (
        "limits: open files: a process may open 79 files here (ulimit -n), and this run needs 80 in each of its workers"
    )
    assert allowed((79, 79), 2).splitlines()[0] == said
    file = write_run(home, "few_files", GRPO, {"outputs": {"dir": str(tmp_path / "out")}})
    command = 'ulimit -n 24 && exec "$0" -m realgraph.cli run "$1"'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "a process may open 24 files here (ulimit -n)" in ended.stderr
    assert "hint: raise the hard limit" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()
