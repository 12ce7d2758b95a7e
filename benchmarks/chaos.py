"""Real runs broken at random: every promise of docs/running.md about ends and resumes is checked after each fault.

    python -m benchmarks.chaos --seed 1 --count 200 [--jobs 2] [--setting NAME] [--fault NAME] [--only INDEX]

Each case is one tiny run of a setting (`chaos_settings`), one fault (`chaos_faults`), its end, `--resume` where it has
not finished, and the checks (`chaos_checks`): a documented exit code within a deadline, one readable error, no
traceback, no process, port or shared memory left; in the end every prompt group trained exactly once, in synchronous
runs with the numbers, weights and optimizer states of an uninterrupted run to the last bit, in asynchronous ones within
the bound. A case depends on seed and index alone; only the moment is as exact as the machine's load lets it be.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos_checks import Trained, error_lines, judge_end, judge_whole, trained
from benchmarks.chaos_engines import EngineFault
from benchmarks.chaos_faults import (
    INSIDE,
    Cold,
    Fault,
    Process,
    Warm,
    await_moment,
    chosen,
    deliver,
    doing,
    draw,
    strain,
)
from benchmarks.chaos_settings import ASYNCHRONOUS, REPLACED, SETTINGS, Setting, chaos_home
from benchmarks.machine import describe
from tests.namespaces import Loopback
from tests.runs import PLAIN, Special, logs, start, write_run
from tests.sglang_server import interpreter, servers_at
from tests.traces import Traces, listening, processes_at, title_of, traces

RESULTS = Path(__file__).parent / "results"
SHOWN = Special(limits={"master.status.STATUS_SECONDS": 0.0})  # the status is as new as can be: moments are found by it
END_SECONDS = 90.0  # for any run to end by itself, or after a fault
SAMPLE_FILES = ("model", "train.jsonl", "test.jsonl", "trained.jsonl", "chaos_functions.py", "rewards.py")


@dataclass
class Case:
    """One fault of one run, and what came of it. missed: the run was over before, so it is no fault."""

    index: int
    setting: str
    fault: Fault
    missed: bool = False
    doing: str = ""  # of the run's workers when it came, by the status
    code: int = 0
    seconds: float = 0.0  # from the fault to the end of all processes
    broken: list[str] = field(default_factory=list)
    evidence: str = ""
    ages: dict[str, int] = field(default_factory=dict)  # steps by the age of their oldest sample
    dropped: int = 0
    masked: int = 0  # steps in which tokens were masked for their age
    ended_by: str = ""  # the error that the run ended with


class Broken(Exception):
    """A run that is not over in time, or can't be resumed."""


class Place:
    """A folder of its own for one case: its runs, one after another."""

    def __init__(self, source: Path, folder: Path, setting: Setting) -> None:
        folder.mkdir(parents=True)
        for name in SAMPLE_FILES:
            path = source / name
            if path.is_dir():
                shutil.copytree(path, folder / name)
            else:
                shutil.copy(path, folder / name)
        self.home, self.setting = folder, setting
        python = {"rollout": {"python": str(interpreter(folder))}} if setting.served else {}
        self.file = write_run(folder, "run", setting.run(), python)
        self.outputs: list[Path] = []
        self.network: Loopback | None = None  # its own, where its connections are to be broken

    @property
    def special(self) -> Special:
        """Differences of its runs from others."""
        shown = SHOWN if self.setting.name in ASYNCHRONOUS | REPLACED else PLAIN
        return shown if self.network is None else replace(shown, namespace=self.network.space)

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.home / "run"

    def begin(self) -> Process:
        """Start the run, or go on with it where it has a checkpoint; one without is begun anew."""
        if any((self.folder / "checkpoints").glob("step-??????")):
            argv = ["run", "--resume", str(self.folder)]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.home / "trained.jsonl").write_text("")
            argv = ["run", str(self.file)]
        if self.setting.cold:
            output = self.home / f"cold-{len(self.outputs)}.out"
            process: Process = Cold(self.home, argv, output)
        else:
            running = start(self.home, *argv, special=self.special)
            output, process = running.output_file, Warm(running)
        self.outputs.append(output)
        return process

    def output(self) -> str:
        """The output of the last process."""
        return self.outputs[-1].read_text() if self.outputs[-1].exists() else ""

    def finish(self) -> None:
        """Begin or go on, to the end. Raises Broken."""
        process = self.begin()
        code = wait(process, END_SECONDS)
        if code != 0:
            process.kill()
            what = "is not over in time" if code is None else f"ends with {code}"
            raise Broken(f"the run that goes on {what}")

    def evidence(self) -> str:
        """The end of the output and of the logs, for whoever looks into a broken promise."""
        text = self.output()
        return f"{text[-3000:]}\n{logs(self.folder)[-3000:]}"


def wait(process: Process, seconds: float) -> int | None:
    """The exit code; None where it has not ended in time."""
    deadline = time.monotonic() + seconds
    while (code := process.ended()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return code


def run_case(case: Case, place: Place, reference: Trained | None, rng: random.Random) -> None:
    """Break the run of one case, go on with it, and note what is broken of the promises."""
    traces_before = traces(place.home)
    process = place.begin()
    try:
        brief = case.fault.moment in INSIDE  # over before processes are found
        first = replace(case.fault, moment="steps", delay=0.0) if brief else case.fault
        if not await_moment(first, process, place.folder, END_SECONDS):
            case.missed = True
            return
        pids = chosen(case.fault, place.home, process.pid, rng)
        if not pids:
            case.missed = True
            return
        servers = servers_at(place.home) if place.setting.served else []
        traces_before.ports |= listening([*processes_at(place.home), *servers])
        if brief and not await_moment(case.fault, process, place.folder, END_SECONDS):
            case.missed = True
            return
        case.doing = ", ".join(sorted(set(doing(place.folder).values())))
        began = time.monotonic()
        if place.network is not None:
            strain(case.fault, place.network)
        elif case.fault.target == "engine":
            struck = EngineFault(case.fault, place.home, place.outputs[-1], rng)
            case.missed = not struck.deliver(process, END_SECONDS) and process.ended() != 3
            traces_before.ports |= listening(processes_at(place.home))
        else:
            deliver(case.fault, pids, process)
        _end(case, place, process, traces_before)
        if place.network is not None:
            place.network.link("up")
        case.seconds = time.monotonic() - began
        if case.code != 0:
            place.finish()
        left = [pid for pid in servers if title_of(pid)] if case.fault.target != "server" else []
        case.broken += [f"left behind: servers {left}"] * bool(left)
        case.broken += judge_whole(found := trained(place.home, place.setting), reference, place.setting)
        _note_ages(case, found)
    except Broken as error:
        case.broken.append(str(error))
    finally:
        if process.ended() is None:
            process.kill()
    if case.broken:
        case.missed = False
        case.evidence = place.evidence()


def _end(case: Case, place: Place, process: Process, traces_before: Traces) -> None:
    """Wait for the end that follows the fault, and judge it. Raises Broken."""
    code = wait(process, END_SECONDS)
    if code is None:
        raise Broken(f"the run has not ended within {END_SECONDS:g} s")
    case.code = code
    case.ended_by = " ".join(error_lines(place.output()))
    case.broken += judge_end(case.fault, code, place.output(), place.folder)
    try:
        traces_before.gone()
    except AssertionError as error:
        case.broken.append(str(error))


def _note_ages(case: Case, found: Trained) -> None:
    for metrics in found.numbers.values():
        age = str(int(metrics["staleness/max"]))
        case.ages[age] = case.ages.get(age, 0) + 1
        case.masked += metrics.get("train/overdue", 0.0) > 0
    case.dropped = int(found.state.get("n_discarded", 0))


class Chaos:
    """The cases of one seed, each in a folder of its own below `work`."""

    def __init__(self, seed: int, work: Path, filters: argparse.Namespace) -> None:
        self.seed, self.work, self.filters = seed, work, filters
        self.source = chaos_home(work / "source")
        self.references: dict[str, Trained] = {}

    def refer(self, setting: Setting) -> list[str]:
        """An uninterrupted run of a setting, kept for its cases. Returns what is wrong even with it."""
        place = Place(self.source, self.work / f"reference-{setting.name}", setting)
        try:
            place.finish()
        except Broken as error:
            return [f"{setting.name}, uninterrupted: {error}\n{place.evidence()}"]
        self.references[setting.name] = trained(place.home, setting)
        return [
            f"{setting.name}, uninterrupted: {text}"
            for text in judge_whole(self.references[setting.name], None, setting)
        ]

    def cases(self, count: int, first: int = 0) -> list[Case]:
        """The cases from index `first` on that pass the filters."""
        found: list[Case] = []
        index = first
        while len(found) < count:
            rng = random.Random(f"{self.seed} {index}")
            setting = SETTINGS[rng.choice(list(SETTINGS))]
            case = Case(index, setting.name, draw(setting, rng))
            if self.filters.setting in ("", case.setting) and self.filters.fault in ("", str(case.fault)):
                found.append(case)
            index += 1
        return found

    def run(self, case: Case) -> Case:
        """Run one case and remove what it wrote where nothing is broken."""
        place = Place(self.source, self.work / f"case-{case.index}", SETTINGS[case.setting])
        run_case(case, place, self.references.get(case.setting), random.Random(f"{self.seed} {case.index} target"))
        if not case.broken and not self.filters.keep:
            shutil.rmtree(place.home, ignore_errors=True)
        show(case)
        return case


def show(case: Case) -> None:
    """A line of a case that has ended, and one for each promise that it broke."""
    state = "missed" if case.missed else "BROKEN" if case.broken else "ok"
    print(
        f"{case.index:>4}  {case.setting:<28} {case.fault!s:<26} {case.fault.moment:<13}"
        f" code {case.code:>4} {case.seconds:>5.1f} s  {state}  {case.doing}".rstrip(),
        *(f"      {text}" for text in case.broken),
        sep="\n",
        flush=True,
    )


def run_all(chaos: Chaos, count: int, jobs: int) -> list[Case]:
    """Cases until `count` faults have reached their run, two at a time where `jobs` is 2."""
    done: list[Case] = []
    first = 0
    with ThreadPoolExecutor(jobs) as pool:
        while (missing := count - sum(not case.missed for case in done)) > 0:
            cases = chaos.cases(missing, first)
            first = cases[-1].index + 1
            done += pool.map(chaos.run, cases)
    return done


def table(done: Sequence[Case]) -> str:
    """Faults by setting and kind: count, and broken promises where there are any."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    broken: dict[str, Counter[str]] = defaultdict(Counter)
    for case in done:
        if not case.missed:
            counts[str(case.fault)][case.setting] += 1
            broken[str(case.fault)][case.setting] += len(case.broken)
    head = f"{'fault':<26}" + "".join(f"{name:>18}" for name in SETTINGS)
    lines = [head]
    for fault in sorted(counts):
        cells = [
            f"{counts[fault][name]}" + f" ({broken[fault][name]})" * bool(broken[fault][name]) for name in SETTINGS
        ]
        lines.append(f"{fault:<26}" + "".join(f"{cell if cell != '0' else '.':>18}" for cell in cells))
    return "\n".join(lines)


def result(done: Sequence[Case], asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The head and the rows of the results' file."""
    hit = [case for case in done if not case.missed]
    ages: Counter[str] = Counter()
    for case in hit:
        ages.update(case.ages)
    return {
        "machine": describe(),
        "seed": asked.seed,
        "faults": len(hit),
        "missed": len(done) - len(hit),
        "broken_promises": sum(len(case.broken) for case in hit),
        "minutes": round(seconds / 60, 1),
        "median_seconds_to_the_end": sorted(case.seconds for case in hit)[len(hit) // 2],
        "exit_codes": dict(Counter(str(case.code) for case in hit)),
        "by_setting": dict(Counter(case.setting for case in hit)),
        "by_fault": dict(Counter(str(case.fault) for case in hit)),
        "by_moment": dict(Counter(case.fault.moment for case in hit)),
        "steps_by_age_of_their_oldest_sample": dict(sorted(ages.items(), key=lambda item: int(item[0]))),
        "steps_with_masked_tokens": sum(case.masked for case in hit),
        "groups_dropped_or_filtered": sum(case.dropped for case in hit),
        "broken": [
            asdict(case) | {"again": f"python -m benchmarks.chaos --seed {asked.seed} --only {case.index} --keep"}
            for case in hit
            if case.broken
        ],
    }


def main() -> int:
    """Run the cases, print the table, write the results; 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="faults")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--setting", default="", choices=("", *SETTINGS), help="only this one")
    parser.add_argument("--fault", default="", help="only this one, such as 'KILL to worker'")
    parser.add_argument("--only", type=int, default=None, help="index of the one case to run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.json")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="realgraph-chaos-"))
    chaos = Chaos(asked.seed, work, asked)
    if asked.only is not None:
        chosen_case = chaos.cases(1, asked.only)
        needed, count = [chosen_case[0].setting], 1
    else:
        chosen_case, count = [], asked.count
        needed = (
            [asked.setting] if asked.setting else sorted({case.setting for case in chaos.cases(count)} | set(SETTINGS))
        )
    problems = [text for name in needed for text in chaos.refer(SETTINGS[name])]
    print("\n".join(problems) or f"{len(needed)} settings run without a fault", flush=True)
    done = [chaos.run(chosen_case[0])] if chosen_case else run_all(chaos, count, asked.jobs)
    print(table(done))
    found = result(done, asked, time.monotonic() - began) | {"uninterrupted": problems}
    print(f"{found['faults']} faults, {found['broken_promises']} broken promises, {found['minutes']} minutes")
    if asked.only is None and not (asked.setting or asked.fault):
        asked.out.parent.mkdir(exist_ok=True)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if found["broken"] or asked.keep:
        print(f"what broken runs have left: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if found["broken"] or problems else 0


if __name__ == "__main__":
    sys.exit(main())
