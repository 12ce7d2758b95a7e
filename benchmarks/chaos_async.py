"""Asynchronous runs broken at random, simulated and real: no group is lost or trained twice, the age bound holds, and
nothing is left.

    python -m benchmarks.chaos_async --simulated 10000 --real 100 --seed 1 [--resume] [--only INDEX]

Simulated: the Scheduler at staleness 1 to 4, under all `overdue` policies and interrupt modes, with workers killed,
stopped and continued, links delayed and cut, masters killed and runs interrupted, at random moments and inside
transfers, switches, checkpoints and evaluations. Real: two CPU workers, one of which generates, embedded or on a
stand-in of an SGLang server, killed and stopped at such moments, as their own status tells these, and resumed; some in
a network namespace of their own (Linux, as root), whose connections are cut, for a moment or for good, and slowed.
`--resume` adds to the cases that are on record. `--faults engines`: of real runs with two engines, one is killed or
stopped, and so are the new processes in its place, while they take their weights or as they have joined (give it an
`--out` of its own).
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import chaos_engines
from benchmarks.chaos import Broken, Case, Place, run_case, show
from benchmarks.chaos_checks import judge_whole, trained
from benchmarks.chaos_faults import LINKS, START_SECONDS, Fault
from benchmarks.chaos_settings import ASYNCHRONOUS, EVERY, REPLACED, STEPS, Setting, chaos_home
from benchmarks.machine import describe
from tests.broken_simulations import broken_run
from tests.namespaces import hide, loopback

RESULTS = Path(__file__).parent / "results"
LIVES, SIMULATED_STEPS = 10, 20
SIGNALS = ("KILL", "STOP", "STOP, CONT")
TARGETS = ("master", "worker", "functions", "all")
MOMENTS = ("start", "steps", "transfer", "switch", "checkpoint", "in evaluation")


def simulate(n_faults: int, seed: int) -> dict[str, Any]:
    """Break simulated runs until there were so many faults."""
    faults: Counter[tuple[str, str]] = Counter()
    bounds: Counter[str] = Counter()
    broken: list[str] = []
    began, n_runs, n_events, n_old = time.monotonic(), 0, 0, 0
    while faults.total() < n_faults:
        outcome = broken_run(seed * 10**6 + n_runs, lives=LIVES, least=1, steps=SIMULATED_STEPS)
        faults += outcome.faults
        shape = outcome.shape
        bounds[f"{shape.staleness} {shape.overdue}, {shape.interrupt}"] += outcome.faults.total()
        broken += [f"run {n_runs}: {problem}" for problem in outcome.problems]
        n_runs, n_events, n_old = n_runs + 1, n_events + outcome.n_events, n_old + outcome.n_old
    kinds, moments = Counter[str](), Counter[str]()
    for (kind, moment), n in faults.items():
        kinds[kind] += n
        moments[moment] += n
    return {
        "faults": faults.total(),
        "runs": n_runs,
        "events": n_events,
        "steps_with_samples_beyond_the_bound": n_old,
        "by_kind": dict(kinds),
        "by_moment": dict(moments),
        "by_setting": dict(sorted(bounds.items())),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "broken": broken,
    }


def drawn(seed: int, index: int, kinds: str) -> Case:
    """The real case of an index, of faults of these kinds."""
    if kinds == "engines":
        rng = random.Random(f"{seed} {index} engines")
        return Case(index, rng.choice(list(REPLACED)), chaos_engines.draw(rng))
    rng = random.Random(f"{seed} {index}")
    setting = ASYNCHRONOUS[rng.choice(list(ASYNCHRONOUS))]
    return Case(index, setting.name, draw(setting, rng))


def draw(setting: Setting, rng: random.Random) -> Fault:
    """A fault that makes sense for the setting."""
    targets = (*TARGETS, "links", "links", *(("server", "server") if setting.served else ()))
    target, moment = rng.choice(targets), rng.choice(MOMENTS)
    number = rng.choice(LINKS if target == "links" else SIGNALS)
    if number == "STOP" and target in ("functions", "server"):
        number = "KILL"  # what is only silent is waited for as long as its calls may take: no test waits so long
    if moment == "start" and target in ("functions", "server", "links"):
        moment = "steps"
    at = {"checkpoint": EVERY["checkpoint"], "in evaluation": EVERY["eval"]}.get(moment, 1)
    step = at * rng.randint(1, max(1, (STEPS - 2) // at)) - (at > 1)
    delay = rng.uniform(0, START_SECONDS) if moment == "start" else rng.expovariate(20) * (moment == "steps")
    return Fault(number, target, moment, delay, step)


def run(case: Case, source: Path, work: Path, seed: int) -> Case:
    """Run one real case, show it, and remove what it wrote where nothing is broken."""
    place = Place(source, work / f"case-{case.index}", (ASYNCHRONOUS | REPLACED)[case.setting])
    with loopback() if case.fault.target == "links" else nullcontext() as place.network:
        run_case(case, place, None, random.Random(f"{seed} {case.index} target"))
    if not case.broken:
        shutil.rmtree(place.home, ignore_errors=True)
    show(case)
    return case


def uninterrupted(source: Path, work: Path, kinds: str) -> list[str]:
    """Broken promises of the settings themselves."""
    problems = []
    for name, setting in (REPLACED if kinds == "engines" else ASYNCHRONOUS).items():
        place = Place(source, work / f"reference-{name}", setting)
        try:
            place.finish()
            found = judge_whole(trained(place.home, setting), None, setting)
        except Broken as error:
            found = [f"{error}\n{place.evidence()}"]
        problems += [f"{name}, uninterrupted: {text}" for text in found]
    return problems


def strike(asked: argparse.Namespace, work: Path, before: Sequence[Case]) -> Iterator[list[Case]]:
    """Break real runs until so many faults have reached theirs, or the minutes are over: all cases, after each.

    before: those on record.
    """
    began, source = time.monotonic(), chaos_home(work / "source")
    done = list(before)
    known = {case.index for case in done}
    n_faults = 1 if asked.only is not None else asked.real
    for index in count(asked.first if asked.only is None else asked.only):
        if index in known:
            continue
        n_hit = sum(not case.missed for case in done)
        if n_hit >= n_faults or time.monotonic() > began + 60 * asked.minutes:
            return
        done.append(run(drawn(asked.seed, index, asked.faults), source, work, asked.seed))
        yield done


def real_record(cases: Sequence[Case], seed: int, kinds: str) -> dict[str, Any]:
    """The real part of the results."""
    hit = [case for case in cases if not case.missed]
    again = f"python -m benchmarks.chaos_async --simulated 0 --seed {seed} --faults {kinds} --only"
    return {
        "faults": len(hit),
        "missed": len(cases) - len(hit),
        "by_setting": dict(Counter(case.setting for case in hit)),
        "by_fault": dict(Counter(str(case.fault) for case in hit)),
        "by_moment": dict(Counter(case.fault.moment for case in hit)),
        "by_what_the_run_did": dict(Counter(case.doing.partition(" of step")[0] for case in hit)),
        "exit_codes": dict(Counter(str(case.code) for case in hit)),
        "groups_dropped": sum(case.dropped for case in hit),
        "broken": [{"case": case.index, "again": f"{again} {case.index}"} for case in hit if case.broken],
        "cases": [asdict(case) for case in cases],
    }


def on_record(asked: argparse.Namespace) -> tuple[dict[str, Any], list[Case]]:
    """The results that are gone on with, and their real cases; none where there are none, or of another seed."""
    if not (asked.resume and asked.out.exists()):
        return {}, []
    found = json.loads(asked.out.read_text())
    if found["seed"] != asked.seed:
        return {}, []
    return found, [Case(**one | {"fault": Fault(**one["fault"])}) for one in found["real"].get("cases", ())]


def main() -> int:
    """Run both kinds, print what came of them, write the results after every case; 1 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulated", type=int, default=10_000, help="faults of simulated runs")
    parser.add_argument("--real", type=int, default=100, help="faults of real runs, with those on record")
    parser.add_argument(
        "--faults", default="all", choices=("all", "engines"), help="of real runs: engines are replaced"
    )
    parser.add_argument("--first", type=int, default=0, help="index of the first real case")
    parser.add_argument("--minutes", type=float, default=120.0, help="no real case begins later")
    parser.add_argument("--resume", action="store_true", help="go on after the cases on record, of the same seed")
    parser.add_argument("--only", type=int, default=None, help="index of the one real case to run")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos_async.json")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if os.geteuid() == 0:
        hide("/dev/shm")  # what is left there is then of these runs, whatever else this machine does
    work = Path(tempfile.mkdtemp(prefix="realgraph-chaos-async-"))
    found, cases = on_record(asked)
    if asked.simulated:
        found["simulated"] = simulate(asked.simulated, asked.seed)
    simulated = found.setdefault("simulated", {"faults": 0, "runs": 0, "broken": []})
    print(f"simulated: {simulated['faults']} faults in {simulated['runs']} runs", *simulated["broken"], sep="\n")
    if asked.only is None and not cases:
        found["uninterrupted"] = uninterrupted(chaos_home(work / "references"), work, asked.faults)
        print("\n".join(found["uninterrupted"]) or "the settings run without a fault", flush=True)
    for done in strike(asked, work, cases):
        cases = done
        found |= {"machine": describe(), "seed": asked.seed, "real": real_record(cases, asked.seed, asked.faults)}
        if asked.only is None:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    hit = [case for case in cases if not case.missed]
    broken = [*simulated["broken"], *found.get("uninterrupted", ()), *(text for case in hit for text in case.broken)]
    print(f"{'FAIL' if broken else 'PASS'}: {simulated['faults']} simulated and {len(hit)} real faults,", end=" ")
    print(f"{len(broken)} broken promises")
    if broken:
        print(f"what broken runs have left: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
