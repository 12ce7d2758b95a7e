"""Real runs over two hosts broken at random: every promise of docs/hosts.md about ends is checked after each fault.

    python -m benchmarks.chaos_hosts --seed 1 --count 60 [--fault NAME] [--only INDEX]

Hosts are network namespaces on this machine (Linux, as root). Each case is one run of two hosts with two workers each,
one fault at a random moment, its end, `--resume` on both hosts or on one, and the checks: a documented exit code within
a deadline, one error line that names a host, nothing left on any host; in the end every prompt group trained exactly
once, under the same plan with the numbers and weights of an uninterrupted run. A case depends on seed and index alone;
only the moment is as exact as the machine's load lets it be.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos import SAMPLE_FILES
from benchmarks.chaos_checks import Trained, judge_whole, trained
from benchmarks.chaos_settings import GRPO, Setting, chaos_home
from benchmarks.machine import describe
from tests.host_runs import Hosts
from tests.namespaces import Network, network, why_not
from tests.runs import logs, merged, records, write_run
from tests.traces import descends, processes_at, title_of

RESULTS = Path(__file__).parent / "results"
END_SECONDS = 90.0  # for a run to end after a fault, or when it goes on
SHORT_SECONDS = 3.0  # a link is down for less than what a host may be silent for
IMPATIENT = {"hosts.agent.MASTER_LOST_SECONDS": 6.0, "wire.curve.PING_SECONDS": 1, "wire.curve.SILENT_SECONDS": 5}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}
ENDED = {0, 3}  # the run was over, or ends for what it has lost
CODES = {
    "worker killed": ENDED,
    "worker stopped": ENDED,
    "agent killed": ENDED,
    "agent stopped": ENDED,
    "agent interrupted": ENDED,
    "host killed": ENDED,
    "host stopped": ENDED,
    "link down for good": ENDED,
    "link down for a moment": {0},
    "link of 1 Gbit/s": {0},
    "master killed": {0, -signal.SIGKILL},
    "master interrupted": {0, 130},
}
BY_ITSELF = {"worker killed", "agent killed", "agent interrupted", "host killed"}  # what a run with restarts outlives
ON_ONE_HOST = ("--replan", "cluster.nodes=1", "allocation.train.devices=2")
HOSTS: dict[str, Any] = {
    "cluster": {"nodes": 2, "devices": 2},
    "launch": {"kind": "hosts", "listen": "127.0.0.1:7000", "join_seconds": 25},
    "runtime": {"lost_after_seconds": 10.0, "start_seconds": 60.0, "min_deadline_seconds": 60.0},
}


def allocated(**train: Any) -> dict[str, Any]:
    """A setting's parts whose training is cut over all four workers."""
    return merged(GRPO, HOSTS, {"allocation": {"train": {"devices": 4, **train}}})


SETTINGS = {
    "dp 4": Setting("dp 4", allocated(tp=1, sharding="replicated")),
    "fsdp 4": Setting("fsdp 4", allocated(sharding="fsdp")),
    "tp 2 dp 2": Setting("tp 2 dp 2", allocated(tp=2)),
    "restarts": Setting("restarts", merged(GRPO, HOSTS, {"runtime": {"restarts": 1}})),
}


@dataclass(frozen=True)
class Fault:
    """An event at host number `host` (the run's own is 0) so many seconds after a moment. step: 0 for the moment
    at which agents begin to join. one_host: goes on with one host, by --replan."""

    name: str
    host: int
    step: int
    delay: float
    one_host: bool


@dataclass
class Case:
    """One fault of one run, and what came of it. missed: the run was over before, so it is no fault."""

    index: int
    setting: str
    fault: Fault
    missed: bool = False
    code: int | None = None
    seconds: float = 0.0  # from the fault to the end of the run
    broken: list[str] = field(default_factory=list)
    evidence: str = ""


def drawn(seed: int, index: int) -> Case:
    """The case of an index."""
    rng = random.Random(f"{seed} {index}")
    setting = SETTINGS[rng.choice(list(SETTINGS))]
    name = rng.choice(sorted(BY_ITSELF) if setting.name == "restarts" else list(CODES))
    step = rng.randint(0, int(setting.run()["steps"]) - 2)
    delay = rng.uniform(0, 4) if not step else rng.expovariate(10)
    return Case(index, setting.name, Fault(name, rng.randrange(2), step, delay, rng.random() < 0.4))


class Place:
    """A folder of its own for one case, its network, and its runs one after another."""

    def __init__(self, source: Path, folder: Path, setting: Setting, made: Network) -> None:
        folder.mkdir(parents=True)
        for name in SAMPLE_FILES:
            path = source / name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / name)
        self.home, self.setting, self.network = folder, setting, made
        self.file = write_run(folder, "run", setting.run())
        self.running: Hosts | None = None

    def saved(self) -> bool:
        """True where the run can go on from a checkpoint."""
        return any((self.home / "run/checkpoints").glob("step-??????"))

    def begin(self, *, one_host: bool = False) -> Hosts:
        """Start the run and its agents, or go on; one without a checkpoint is begun anew."""
        if self.saved():
            fewer = ON_ONE_HOST if one_host else ()
            words: tuple[str, ...] = ("run", "--resume", str(self.home / "run"), *fewer)
        else:
            one_host = False
            shutil.rmtree(self.home / "run", ignore_errors=True)
            (self.home / "trained.jsonl").write_text("")
            words = ("run", str(self.file))
        (self.home / "run/join.key").unlink(missing_ok=True)
        names = "a" if one_host else "ab"
        self.running = Hosts(self.home, words=words, names=names, network=self.network, limits=IMPATIENT)
        return self.running

    def evidence(self) -> str:
        """The ends of all that was printed, for whoever looks into a broken promise."""
        if self.running is None:
            return ""
        texts = [one.output()[-2000:] for one in (self.running.running, *self.running.agents.values())]
        return "\n---\n".join([*texts, logs(self.home / "run")[-2000:]])


def wait(running: Hosts, seconds: float) -> int | None:
    """The exit code of the master; None where it has not ended in time."""
    running.running.process.join(seconds)
    return running.running.process.exitcode


def come(case: Case, running: Hosts) -> bool:
    """Wait for the moment of the fault; False where the run is over before."""
    last = time.monotonic() + END_SECONDS
    while case.fault.step and max((record["step"] + 1 for record in records(running.home / "run")), default=0) < (
        case.fault.step
    ):
        if not running.running.process.is_alive() or time.monotonic() > last:
            return False
        time.sleep(0.005)
    time.sleep(case.fault.delay)
    return running.running.process.is_alive()


def targets(fault: Fault, running: Hosts) -> list[int]:
    """The processes that a fault reaches."""
    agent = running.agents["ab"[fault.host]].pid
    below = [pid for pid in processes_at(running.home) if pid != agent and descends(pid, agent)]
    match fault.name.split()[0]:
        case "master":
            return [running.running.pid]
        case "agent":
            return [agent]
        case "worker":
            return [pid for pid in below if title_of(pid).startswith("realgraph worker ")][:1]
        case _:
            return [agent, *below]


@contextlib.contextmanager
def struck(fault: Fault, running: Hosts, made: Network) -> Iterator[bool]:
    """The fault, for as long as it lasts; False where there was nothing to reach. It is over afterwards."""
    host, (thing, _, what) = fault.host, fault.name.partition(" ")
    if thing != "link":
        pids = targets(fault, running)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[what])
        yield bool(pids)
        for pid in pids if what == "stopped" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return
    if what.startswith("of"):
        made.shape(host, "1gbit")
    else:
        made.link(host, "down")
    try:
        if what.endswith("moment"):
            time.sleep(SHORT_SECONDS)
            made.link(host, "up")
        yield True
    finally:
        if what.startswith("of"):
            made.shape(host, "")
        else:
            made.link(host, "up")


def rounded(found: Trained) -> Trained:
    """Means of evaluations to 12 digits: their samples come in any order."""
    evals = {step: {name: round(value, 12) for name, value in means.items()} for step, means in found.evals.items()}
    return replace(found, evals=evals)


def run_case(case: Case, place: Place, reference: Trained) -> None:
    """Break the run of one case, go on with it, and note what is broken of the promises."""
    running = place.begin()
    try:
        if not come(case, running):
            case.missed = True
            return
        began = time.monotonic()
        with struck(case.fault, running, place.network) as reached:
            case.missed = not reached
            case.code = wait(running, END_SECONDS)
            case.seconds = time.monotonic() - began
            if case.fault.name == "link down for good":  # that host's processes end by themselves
                running.agents["b"].process.join(END_SECONDS)
        judge_end(case, running)
        if case.code != 0:
            again = place.begin(one_host=case.fault.one_host)
            if (code := wait(again, END_SECONDS)) != 0:
                case.broken.append(f"the run that goes on ends with {code}")
                return
        fewer = json.loads((place.home / "run/job.json").read_text())["cluster"]["nodes"] == 1
        setting = place.setting
        found = rounded(trained(place.home, setting))
        case.broken += judge_whole(found, None if fewer else rounded(reference), setting)
    finally:
        if case.broken:
            case.evidence = place.evidence()
        if place.running is not None:
            place.running.close()


def judge_end(case: Case, running: Hosts) -> None:
    """Note what is broken of the promises about the end that followed a fault."""
    expected = {0} if case.setting == "restarts" and case.fault.step > 2 else CODES[case.fault.name]
    if case.missed:
        expected = {0}
    output = running.running.output()
    if case.code not in expected:
        case.broken.append(f"exit code {case.code}, expected one of {sorted(expected)}")
    if "Traceback" in output:
        case.broken.append("a traceback on the terminal")
    errors = re.findall(r"^error: .*$", output, re.MULTILINE)
    if case.code == 3 and case.setting != "restarts" and len(errors) != 1:
        case.broken.append(f"{len(errors)} error lines: {errors}")
    if errors and not re.search(r"host [ab]\b|hosts have joined", errors[-1]):
        case.broken.append(f"no host is named: {errors[-1]}")
    try:
        running.traces.gone(75)
    except AssertionError as error:
        case.broken.append(str(error))


def run(case: Case, source: Path, work: Path, reference: Trained) -> Case:
    """Run one case and remove what it wrote where nothing is broken."""
    with network(2) as made:
        place = Place(source, work / f"case-{case.index}", SETTINGS[case.setting], made)
        run_case(case, place, reference)
    if not case.broken:
        shutil.rmtree(place.home, ignore_errors=True)
    state = "missed" if case.missed else "BROKEN" if case.broken else "ok"
    fault = case.fault
    where = f"host {'ab'[fault.host]} step {fault.step}" + " then one host" * fault.one_host
    print(
        f"{case.index:>4}  {case.setting:<10} {fault.name:<24} {where:<30} code {case.code!s:>4}"
        f" {case.seconds:>5.1f} s  {state}",
        flush=True,
    )
    for text in case.broken:
        print(f"      {text}", flush=True)
    return case


def uninterrupted(source: Path, work: Path) -> dict[str, Trained]:
    """The training of each setting without a fault."""
    found = {}
    for name, setting in SETTINGS.items():
        with network(2) as made:
            place = Place(source, work / f"reference-{name}", setting, made)
            code = wait(place.begin(), END_SECONDS)
            found[name] = trained(place.home, setting)
            problems = judge_whole(found[name], None, setting)
            if code != 0 or problems:
                raise SystemExit(f"{name}, uninterrupted, ends with {code}: {problems}\n{place.evidence()}")
    return found


def main() -> int:
    """Run the cases, print them, write the results; 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="faults")
    parser.add_argument("--fault", default="", choices=("", *CODES), help="only this one")
    parser.add_argument("--only", type=int, default=None, help="index of the one case to run")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos_hosts.json")
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"skipped: {reason}")
    os.environ["OMP_NUM_THREADS"] = "1"
    began, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="realgraph-chaos-hosts-"))
    source = chaos_home(work / "source")
    references = uninterrupted(source, work)
    done: list[Case] = []
    index = asked.only or 0
    while sum(not case.missed for case in done) < (1 if asked.only is not None else asked.count):
        case = drawn(asked.seed, index)
        index += 1
        if asked.fault in ("", case.fault.name):
            done.append(run(case, source, work, references[case.setting]))
    hit = [case for case in done if not case.missed]
    broken = [case for case in done if case.broken]
    found = {
        "machine": describe(),
        "seed": asked.seed,
        "faults": len(hit),
        "missed": len(done) - len(hit),
        "broken_promises": sum(len(case.broken) for case in broken),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "by_fault": dict(Counter(case.fault.name for case in hit)),
        "by_setting": dict(Counter(case.setting for case in hit)),
        "exit_codes": dict(Counter(str(case.code) for case in hit)),
        "most_seconds_to_the_end": max(case.seconds for case in hit),
        "broken": [asdict(case) for case in broken],
    }
    print(f"{found['faults']} faults, {found['broken_promises']} broken promises, {found['minutes']} minutes")
    print("PASS" if not broken else f"FAIL: what broken runs have left: {work}")
    if asked.only is None and not asked.fault:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if not broken:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
