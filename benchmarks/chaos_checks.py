"""Checks of `benchmarks.chaos` on a run: how it ends, what it leaves, and that nothing is lost or trained twice."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.audit import judge_run
from benchmarks.chaos_faults import INTERRUPTS, Fault, codes
from benchmarks.chaos_settings import GROUPS, N_TRAIN, SAMPLES, Setting
from realgraph.graphs.spec import Train
from realgraph.runtime.job.cursor import permutation
from realgraph.runtime.job.job import Job
from tests.resumed_runs import ledger_problems
from tests.runs import BASE, numbers, records


@dataclass
class Trained:
    """The record of what a run has trained. groups: step -> the numbers of its prompt groups."""

    numbers: dict[int, dict[str, float]]
    groups: dict[int, list[int]]
    evals: dict[int, dict[str, float]]
    state: dict[str, Any]
    sums: dict[str, str]  # of the files of the last checkpoint
    problems: list[str] = field(default_factory=list)
    audit: tuple[str, ...] = ()  # broken promises about ages and samples, where losses were audited


def trained(home: Path, setting: Setting) -> Trained:
    """Read it from a run's directory. Where losses were not audited, groups are those that its function over batches
    has noted; it may have noted a batch that was then taken apart, as an engine was lost."""
    folder, steps = home / "run", int(setting.run()["steps"])
    last = folder / f"checkpoints/step-{steps:06d}"
    state = json.loads((last / "state.json").read_text()) if (last / "state.json").is_file() else {}
    files = sorted(path for path in last.rglob("*.safetensors") if path.is_file())
    sums = {str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    evals = {record["step"]: record["metrics"] for record in records(folder, "eval")}
    found = Trained(numbers(folder), {}, evals, state, sums)
    if (folder / "audit").is_dir():
        judged = judge_run(folder)
        found.audit, found.groups = judged.problems, judged.groups
    else:
        found.groups = _noted_groups(home, found.problems)
    return found


def _noted_groups(home: Path, problems: list[str]) -> dict[int, list[int]]:
    """step -> its groups. A later start of the run repeats the steps from where it goes on."""
    group_of = {int(row): group for group, row in enumerate(permutation(N_TRAIN, BASE["seed"], 0))}
    lines = [json.loads(line) for line in (home / "trained.jsonl").read_text().splitlines()]
    starts = [(record["time"], record["first_step"]) for record in records(home / "run", "start")]
    found: dict[int, list[int]] = {}
    for number, (began, first) in enumerate(starts):
        ended = starts[number + 1][0] if number + 1 < len(starts) else float("inf")
        batches = [rows for at, rows in lines if began <= at < ended and len(rows) == GROUPS * SAMPLES]
        for step, rows in enumerate(batches, first):
            counts = Counter(group_of[int(row)] for row in rows)
            if set(counts.values()) != {SAMPLES}:
                problems.append(f"step {step} has samples of groups {dict(counts)}, not {SAMPLES} of each")
            found[step] = sorted(counts)
    return found


def judge_whole(found: Trained, reference: Trained | None, setting: Setting) -> list[str]:
    """Broken promises of a run that is over, however often it was broken before."""
    steps = int(setting.run()["steps"])
    problems = list(found.problems)
    if sorted(found.numbers) != list(range(steps)):
        problems.append(f"steps on record: {sorted(found.numbers)}")
    every = [group for step in range(steps) for group in found.groups.get(step, [])]
    twice = [group for group, count in Counter(every).items() if count > 1]
    if twice:
        problems.append(f"groups trained more than once: {twice}")
    state = found.state
    problems += ledger_problems(state, set(every), steps, GROUPS) if state else ["the last checkpoint has no state"]
    if setting.staleness and setting.overdue != "mask":
        ages = {step: metrics["staleness/max"] for step, metrics in found.numbers.items()}
        problems += [f"step {step}: age {age} over the bound" for step, age in ages.items() if age > setting.staleness]
    if found.audit:
        problems += [f"audit: {text}" for text in found.audit]
    if setting.exact and reference is not None:
        problems += _same(found, reference)
    return problems


def _same(found: Trained, reference: Trained) -> list[str]:
    problems = []
    for step, metrics in reference.numbers.items():
        if step in found.numbers and found.numbers[step] != metrics:
            other = [name for name, value in metrics.items() if found.numbers[step].get(name) != value]
            problems.append(f"step {step} has other numbers than an uninterrupted run: {', '.join(other)}")
            break
    for name in ("evals", "groups", "sums"):
        if getattr(found, name) != getattr(reference, name):
            problems.append(f"{name} differ from those of an uninterrupted run")
    return problems


def judge_end(fault: Fault, code: int, output: str, folder: Path) -> list[str]:
    """Broken promises of the end that followed a fault."""
    problems = []
    if code not in codes(fault):
        problems.append(f"exit code {code}, expected one of {sorted(codes(fault))}")
    if "Traceback" in output.partition("details could not be written")[0]:
        problems.append("a traceback on the terminal")
    errors = error_lines(output)
    if (code == 3) != (len(errors) == 1):
        problems.append(f"{len(errors)} error lines at exit code {code}: {errors}")
    done = max((record["step"] + 1 for record in records(folder)), default=0)
    saved = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-??????")), default=0)
    if saves(fault, code, folder) and saved != done:
        problems.append(f"{done} steps were whole, the newest checkpoint has {saved}")
    return problems


def error_lines(output: str) -> list[str]:
    """The errors that a run has written to the terminal."""
    return re.findall(r"^error: .*$", output, re.MULTILINE)


def saves(fault: Fault, code: int, folder: Path) -> bool:
    """True where the last whole step must be saved after this end of the run in `folder`."""
    match code:
        case 0:
            return True
        case 130:
            return fault.signal in INTERRUPTS and fault.signal != "INT, INT"
        case 3:
            return fault.target in ("functions", "engine") or (fault.target == "worker" and survives(folder))
        case _:
            return False


def survives(folder: Path) -> bool:
    """True where every trained role lies whole on two workers or more, by the plan of the run in `folder`."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    trains = [name for name, call in job.graph.calls.items() if isinstance(call, Train)]
    layouts = [job.plan.allocations[name].layout for name in trains]
    return all(layout.sharding == "replicated" and len(layout.mesh.devices) > 1 for layout in layouts)
