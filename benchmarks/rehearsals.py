"""Rehearsals of plans: both shipped GPU configurations, and the plan of every case of planner.py up to 64 devices.

Run from the repository root: `python -m benchmarks.rehearsals`, `--devices N` (cases of up to N devices, 64 unless
told), `--only NAME`, `--limit SECONDS` (of a plan, 7200 unless told), `--resume` (what passes on record is left out).
Each plan is searched, then followed by one process a device (`realgraph rehearse --plan`) on this machine's CPU:
losses, gradient norms, rewards and samples must be those of one process, bytes and orders those of the plan. One row
each: devices, seconds of the plan's run and of one process's as the command says them, seconds of the whole command and
CPU seconds of all its processes, the most memory that these shared out at a time, and the verdict. 64 processes of
a model of 70B take 21 GiB, and half an hour on two cores that do nothing else. Results go to results/rehearsals.json,
with `--only` those of `--resume` alone.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.machine import describe
from benchmarks.planner import DEFAULT, FULL, requested
from realgraph.planner.plan.codec import plan_to_json
from realgraph.run.planning import plan_for
from realgraph.run.requests import request_for
from realgraph.run_file.compose import check_run

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "rehearsals.json"
CONFIGS = ("gsm8k_grpo_qwen3_1.7b_8xh100.yaml", "ppo_llama3_8b_2x8h100.yaml")
MOST_DEVICES = 64
LIMIT_SECONDS = 7200.0  # of a plan
LOOK_SECONDS = 2.0  # between two looks at the processes' memory


class Rehearsal(Struct, frozen=True):
    """One row. verdict: the last line that the command printed, or its error."""

    case: str
    devices: int
    seconds: float
    cpu_seconds: float  # of all its processes
    memory_gib: float
    exit_code: int
    verdict: str
    plan_seconds: int | None = None
    alone_seconds: int | None = None


def cases(most_devices: int, only: str) -> dict[str, tuple[Path | None, int]]:
    """Name -> the configuration (None: a case of planner.py) and its devices."""
    found: dict[str, tuple[Path | None, int]] = {}
    for config in CONFIGS:
        file = ROOT / "configs" / config
        devices = request_for(check_run(file, (), weights=False)).cluster.n_devices
        found[config.removesuffix(".yaml")] = (file, devices)
    found |= {case.name: (None, case.devices) for case in sorted({*DEFAULT, *FULL}, key=lambda case: case.devices)}
    return {name: one for name, one in found.items() if one[1] <= most_devices and only in name}


def written(name: str, config: Path | None, folder: Path) -> tuple[Path, Path]:
    """The run file of a case and the file of its plan, which is searched here."""
    if config is not None:
        file, checked = config, check_run(config, (), weights=False)
        plan = plan_for(checked, request_for(checked))
    else:
        case = next(case for case in (*DEFAULT, *FULL) if case.name == name)
        request = requested(case, folder)
        file, plan = folder / "run.yaml", plan_for(check_run(folder / "run.yaml", ()), request)
    (folder / "plan.json").write_text(plan_to_json(plan))
    return file, folder / "plan.json"


def rehearsed(name: str, case: tuple[Path | None, int], limit: float) -> Rehearsal:
    """Plan a case, of `cases`, and rehearse it for `limit` seconds at most."""
    config, devices = case
    with tempfile.TemporaryDirectory() as home:
        file, plan = written(name, config, Path(home))
        command = [sys.executable, "-m", "realgraph.cli", "rehearse", str(file), "--plan", str(plan)]
        began, before, most = time.monotonic(), children_seconds(), 0.0
        with (Path(home) / "out").open("w+") as out:
            running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
            while running.poll() is None:
                if time.monotonic() - began > limit:
                    running.terminate()
                most = max(most, family_gib(running.pid))
                try:
                    running.wait(LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
            said = (Path(home) / "out").read_text()
    seconds = time.monotonic() - began
    took = re.search(r"\((\d+) s by the plan, (\d+) s by one process\)", said)
    both = (int(took[1]), int(took[2])) if took else (None, None)
    verdict = next((line for line in reversed(said.splitlines()) if line.startswith(("the plan runs", "error"))), said)
    cpu = children_seconds() - before
    return Rehearsal(name, devices, seconds, cpu, most, running.returncode, verdict[-500:], *both)


def children_seconds() -> float:
    """CPU seconds of all that this process has started and that has ended, and of what that had started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def family_gib(pid: int) -> float:
    """Memory of a process and of all that it started, shared pages divided among those that have them (PSS)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(map(_pss, family)) / 2**20


def _pss(pid: int) -> int:
    """KiB."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))


def on_record() -> list[Rehearsal]:
    """The rows of the results' file whose plans run."""
    if not RESULTS.exists():
        return []
    rows = msgspec.convert(json.loads(RESULTS.read_bytes())["rows"], list[Rehearsal])
    return [row for row in rows if not row.exit_code]


def main() -> int:
    """Rehearse, print, write the results; 1 where a plan fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=MOST_DEVICES)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # each thread of 64 processes keeps freed memory of its own otherwise
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    print(f"{'case':36}{'devices':>8}{'plan s':>8}{'alone s':>8}{'all s':>8}{'CPU s':>8}{'GiB':>7}  verdict")
    rows = on_record() if asked.resume else []
    known = {row.case for row in rows}
    for name, case in cases(min(asked.devices, MOST_DEVICES), asked.only).items():
        if name in known:
            continue
        row = rehearsed(name, case, asked.limit)
        rows.append(row)
        both = f"{row.plan_seconds or '-':>8}{row.alone_seconds or '-':>8}"
        spent = f"{row.seconds:8.0f}{row.cpu_seconds:8.0f}{row.memory_gib:7.1f}"
        print(f"{name:36}{row.devices:8}{both}{spent}  {row.verdict}", flush=True)
        if asked.resume or not asked.only:
            report = {"machine": describe(), "rows": msgspec.to_builtins(rows)}
            RESULTS.write_bytes(msgspec.json.format(json.dumps(report).encode(), indent=1) + b"\n")
    failed = [row.case for row in rows if row.exit_code]
    print(f"FAIL: {', '.join(failed)}" if failed else f"PASS: {len(rows)} plans run as one process does")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
