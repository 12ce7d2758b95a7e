"""Real runs of three checkpoints whose master is killed before each of its file operations.

Each goes on, and nothing is lost: the last weights are those of an untouched run, to the byte.

    python -m benchmarks.crash_points [--every N] [--first N]     # a run is a few seconds, and there are about 80

Prints a line a point, and raises at the first that loses something.
"""

import argparse
import tempfile
import time
from itertools import count
from pathlib import Path

from tests.runs import GRPO, finish, make_home, write_run
from tests.test_crash_points import THREE, survives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="every n-th operation only")
    parser.add_argument("--first", type=int, default=1, help="the first operation")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="realgraph-crash-") as name:
        home = make_home(Path(name) / "home")
        finish(home, "run", str(write_run(home, "three", GRPO, THREE)), name="three")
        began = time.monotonic()
        for n, dies_at in enumerate(count(asked.first, asked.every)):
            if not survives(home, "dying", dies_at, home / "three"):
                print(f"{n} points, the last at operation {dies_at - asked.every}, {time.monotonic() - began:.0f} s")
                return
            print(f"operation {dies_at}: nothing is lost", flush=True)


if __name__ == "__main__":
    main()
