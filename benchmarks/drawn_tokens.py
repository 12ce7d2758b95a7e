"""The cost of telling other engines what one has drawn, so that they go on from it where it is lost.

Run `OMP_NUM_THREADS=1 python -m benchmarks.drawn_tokens`. A second of an engine with many long sequences: collecting
their new tokens, between two decode steps, then encoding them, and taking them on the other side; without the network.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.machine import describe
from realgraph.runtime.drawn.kept import KeptTokens
from realgraph.runtime.drawn.sharing import KEEP_SECONDS, TokenSharing
from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.engine import Request
from realgraph.runtime.generate.slots import RunningSequence

ROUNDS, PER_GROUP, LONG = 7, 8, 4000


def measure(n_sequences: int, tokens_per_second: float) -> dict[str, float]:
    """Seconds of the thread, the least of several beats, and bytes a token."""
    kept, n_new = KeptTokens(), round(tokens_per_second * KEEP_SECONDS)
    sizes: list[int] = []

    def deposit(_: int, data: bytes) -> str:
        sizes.append(len(data))
        kept.take(data)
        return ""

    sharing = TokenSharing(0, kept, deposit)
    sharing.close(0.0)  # its thread: every beat is made here
    sequences = [RunningSequence.of(Request(i, (1, 2), 10**6, seed=i), None) for i in range(n_sequences)]
    for group in range(n_sequences // PER_GROUP):
        sharing.begin(group, range(group * PER_GROUP, (group + 1) * PER_GROUP), 1)

    def drawn(since: Mapping[int, int]) -> list[DrawnTokens]:
        return [sequence.drawn(since[sequence.request.id]) for sequence in sequences]

    def beat(n: int) -> tuple[float, float]:
        for sequence in sequences:
            sequence.tokens += [7] * n
            sequence.logprobs += [-0.5] * n
            sequence.versions += [3] * n
        began = time.thread_time()
        sharing.share(drawn)
        collected = time.thread_time()
        sharing.send()
        return collected - began, time.thread_time() - collected

    beat(LONG)
    sizes.clear()
    beats = [beat(n_new) for _ in range(ROUNDS)]
    return {
        "sequences": n_sequences,
        "tokens_per_second": n_sequences * tokens_per_second,
        "stands_still": min(collect for collect, _ in beats) / KEEP_SECONDS,
        "beside": min(send for _, send in beats) / KEEP_SECONDS,
        "bytes_per_token": sum(sizes) / (ROUNDS * n_sequences * n_new),
    }


def main() -> None:
    """Print a table; `--json` writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    path = parser.parse_args().json
    rows = [measure(n, 50.0) for n in (64, 256, 1024)]
    print(describe())
    print(f"{'sequences':>9} {'tokens/s':>9} {'generation stands still':>24} {'beside it':>10} {'bytes/token':>12}")
    for row in rows:
        shares = f"{row['stands_still']:>24.2%} {row['beside']:>10.2%} {row['bytes_per_token']:>12.2f}"
        print(f"{row['sequences']:>9} {row['tokens_per_second']:>9.0f} {shares}")
    failed = [row for row in rows if row["stands_still"] > 0.02 or row["bytes_per_token"] > 13]
    print("FAIL" if failed else "PASS", "generation stands still for 2 % at most, 13 bytes a token")
    if path is not None:
        path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
