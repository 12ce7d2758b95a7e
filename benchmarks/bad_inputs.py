"""Inputs damaged by chance, each given to a command: no traceback, no hang, and a refusal names file and place.

    OMP_NUM_THREADS=1 python -m benchmarks.bad_inputs --seed 0 --count 400

Run files, graphs, data, plans, tables of costs, planning problems, models, run directories, checkpoints and command
lines are damaged one at a time (`tests/mutations.py`); every case runs in a process of its own, in a copy of a folder
where everything was valid: before the cases, every command is given that, and must end with 0. `--only N` runs one
case of a seed and prints what it says.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from benchmarks.machine import describe
from tests.bad_inputs import HEAVY, QUICK, RUNS, Case, draw, make_place, verdict
from tests.runs import finish, make_home, start

DEADLINE_SECONDS = 60.0
RESULTS = Path(__file__).parent / "results"
SHARES = ((QUICK, 0.7), (HEAVY, 0.15), (RUNS, 0.15))


class Answer(Struct, frozen=True):
    """The answer to a case. wrong: '' where it is as it should be."""

    number: int
    kind: str
    words: str
    what: str
    code: int | None
    seconds: float
    wrong: str
    output: str


def valid(folder: Path) -> Path:
    """A copy of a place with a finished run of two steps and a plan. The place itself is where cases are run."""
    place = make_place(make_home(folder / "place"))
    finish(place, "run", "run.yaml", name="out")
    shutil.copy(place / "out" / "plan.json", place / "plan.json")
    shutil.copy(place / "out" / "plan.json", place / "same.json")
    place.rename(folder / "valid")
    return folder / "valid"


def controls(valid_place: Path, folder: Path) -> list[str]:
    """The commands that refuse what is valid: their cases would say nothing."""
    commands = {words for sources, _ in SHARES for source in sources for words in source.commands}
    answers = [answer(Case("control", words), 0, valid_place, folder) for words in sorted(commands)]
    return [f"{one.words} -> {one.code}\n{one.output}" for one in answers if one.code != 0 or one.wrong]


def case_of(seed: int, number: int, place: Path) -> Case:
    """Case `number` of a seed, whatever the others are."""
    rng = random.Random(f"{seed}/{number}")
    sources = rng.choices([sources for sources, _ in SHARES], [share for _, share in SHARES])[0]
    return draw(rng, place, sources)


def answer(case: Case, number: int, valid_place: Path, folder: Path) -> Answer:
    """Run a case where the valid place was made, for a run knows its directory; it is removed again."""
    place = folder / "place"
    shutil.copytree(valid_place, place, symlinks=True)
    if case.file:
        (place / case.file).write_bytes(case.content)
    began = time.monotonic()
    running = start(place, *case.words)
    running.process.join(DEADLINE_SECONDS)
    code = running.process.exitcode
    seconds = time.monotonic() - began
    if code is None:
        os.killpg(running.pid, signal.SIGKILL)
        running.process.join()
    output = running.output_file.read_bytes().decode("utf-8", "replace")
    shutil.rmtree(place)
    words = " ".join(word[:60] for word in case.words).encode("utf-8", "backslashreplace").decode()
    wrong = verdict(case, code, output)
    where = f"{case.file}: {case.what}" if case.file else case.what
    return Answer(number, case.kind, words, where, code, round(seconds, 2), wrong, output)


def main() -> int:
    """Print every case that is not as it should be; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--only", type=int, nargs="*", help="run these cases alone, and print what they say")
    asked = parser.parse_args()
    found: list[Answer] = []
    with tempfile.TemporaryDirectory() as name:
        place = valid(Path(name))
        refused = controls(place, Path(name))
        if refused:
            print("these commands refuse what is valid, so their cases say nothing:", *refused, sep="\n")
            return 1
        for number in asked.only or range(asked.count):
            one = answer(case_of(asked.seed, number, place), number, place, Path(name))
            found.append(one)
            if one.wrong or asked.only:
                print(f"{number}: {one.wrong or 'fine'}: {one.words} ({one.what}) -> {one.code}, {one.seconds} s")
                print("".join(f"    {line}\n" for line in one.output.splitlines()[-12:]), flush=True)
    wrong = [one for one in found if one.wrong]
    codes = Counter(str(one.code) for one in found)
    print(f"{len(found)} bad inputs: {len(wrong)} answered wrongly; exit codes {dict(sorted(codes.items()))}")
    print("PASS" if not wrong else "FAIL")
    if not asked.only:
        record(asked.seed, found)
    return 1 if wrong else 0


def record(seed: int, found: list[Answer]) -> None:
    """Counts by kind and exit code, and each wrong answer in full."""
    kinds = sorted({one.kind for one in found})
    seconds = sorted(one.seconds for one in found)
    result = {
        "machine": describe(),
        "seed": seed,
        "count": len(found),
        "wrong": [{**asdict(one), "output": one.output[-2000:]} for one in found if one.wrong],
        "exit_codes": {kind: dict(Counter(str(one.code) for one in found if one.kind == kind)) for kind in kinds},
        "median_seconds": seconds[len(seconds) // 2],
        "longest_seconds": seconds[-1],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bad_inputs.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
