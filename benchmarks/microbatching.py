"""Training passes under a budget of tokens, against a fixed count of micro-batches of equally many samples.

Run from the root of the repository: `OMP_NUM_THREADS=1 python -m benchmarks.microbatching`. Long-tailed samples, packed
in both cases, never padded. A fixed count must not exceed the same budget, the memory that both may use, in any step of
a run. `sure`: the least count under which no lengths can, as every micro-batch may be of longest samples. `lucky`: the
least under which none of `DRAWN` drawn steps does, which nobody knows before a run. (AReaL, arXiv 2505.24298, compares
32 micro-batches with a budget of 32,768 tokens on GPUs: 1.06x to 1.50x.) `limit`: the ratio to `sure` were all else but
what a micro-batch costs at any size as fast as bare matrix products (`bare_products`). Steps of all take turns, on one
process and on two under FSDP; only ratios carry over to other machines.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.bare_products import seconds_a_token
from benchmarks.machine import describe
from benchmarks.parallel_engines import SHAPES, timed
from realgraph.graphs.maths import CrossEntropy, Loss, TokenMean
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import open_engine
from realgraph.runtime.train.microbatch import balance
from realgraph.runtime.train.passes import Aim, StepShare
from tests import tiny
from tests.ranks import RankProcesses, joined

Cutting = Literal["budget", "sure", "lucky"]

LAYOUTS = {"one process": Layout(DeviceMesh(0, 1)), "fsdp2": Layout(DeviceMesh(0, 2), dp=2, sharding="fsdp")}
SAMPLES = 32  # of a rank, each step
LONGEST = 512
BUDGET = 1024
DRAWN = 1000  # steps that a fixed count has to hold for
STEPS = 3  # that are measured, of different samples
TARGET = 1.3
RESULTS = Path(__file__).parent / "results" / "microbatching.json"


def lengths_of(step: int, rank: int = 0) -> tuple[int, ...]:
    """Tokens of each sample of a rank's share of a step."""
    rng = random.Random(f"{step} {rank}")
    return tuple(min(LONGEST, max(8, int(rng.lognormvariate(3.8, 0.9)))) for _ in range(SAMPLES))


def dealt(n_samples: int, count: int) -> list[tuple[int, ...]]:
    """Positions of so many micro-batches of equally many samples, but for one, in the batch's order."""
    return [tuple(range(n_samples * i // count, n_samples * (i + 1) // count)) for i in range(count)]


def fixed_counts() -> dict[Cutting, int]:
    """See the module."""
    steps = [lengths_of(step) for step in range(DRAWN)]

    def holds(count: int) -> bool:
        cuts = dealt(SAMPLES, count)
        return all(sum(lengths[i] for i in part) <= BUDGET for lengths in steps for part in cuts)

    lucky = next(count for count in range(1, SAMPLES + 1) if holds(count))
    return {"sure": -(-SAMPLES // (BUDGET // LONGEST)), "lucky": lucky}


def batch_of(lengths: Sequence[int], vocabulary: int) -> Packed:
    """Random tokens, all trained on."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=draw)
    return Packed(tokens, tuple(lengths), torch.ones_like(tokens, dtype=torch.bool))


def run(
    ranks: LayoutRanks, case: str, folder: Path, layout: Layout, counts: dict[Cutting, int]
) -> dict[Cutting, list[float]]:
    """Seconds of each step under either way of cutting; nothing on a worker that the layout leaves out."""
    if ranks.mesh.rank not in layout.mesh.devices:
        return {}
    here = joined[0].of_layout(layout) if layout.mesh.n_devices > 1 else LayoutRanks.alone(ranks.device)
    settings = TrainSettings(max_tokens_per_microbatch=BUDGET, optimizer=Optimizer(), skip_idle=False)
    engine = open_engine(ModelRole(trainable=True), str(folder), layout, here, settings)
    assert engine.adam is not None
    masters, call = engine.adam.masters, Train(model="actor", loss=Loss({"nll": CrossEntropy()}, TokenMean()))

    def step(share: StepShare) -> None:
        engine.passes.accumulate(Aim(call), share, masters)
        engine.passes.reduce(masters, 1.0)

    seconds: dict[Cutting, list[float]] = {"budget": [], **{name: [] for name in counts}}
    for number in range(STEPS):
        batch = batch_of(lengths_of(number, here.dp.rank), SHAPES[case]["vocab_size"])
        (share,) = engine.passes.parts(call.loss, [batch], 0)
        even = {name: replace(share, cuts=dealt(SAMPLES, count), n_passes=count) for name, count in counts.items()}
        shares: dict[Cutting, StepShare] = {"budget": share, **even}
        for name, cut in shares.items():
            seconds[name] += timed(lambda cut=cut: step(cut), here, 1)  # type: ignore[misc]
    return seconds


def ratio_of(seconds: Sequence[float], ours: Sequence[float]) -> float:
    """Median of the ratios of each step."""
    return round(statistics.median(b / a for a, b in zip(ours, seconds, strict=True)), 2)


def limit_of(model: Path, seconds: dict[Cutting, list[float]], n_sure: int, n_ranks: int) -> float:
    """Median over the steps of the ratio to `sure` of a trainer that takes the seconds of the bare products and, for
    each micro-batch, what the step of `sure` takes longer for each that it has more."""
    a_token = sum(seconds_a_token(model, BUDGET, n_ranks))
    ratios = []
    for step, (sure, ours) in enumerate(zip(seconds["sure"], seconds["budget"], strict=True)):
        lengths = [lengths_of(step, rank) for rank in range(n_ranks)]
        count = max(len(balance(of_rank, BUDGET)) for of_rank in lengths)
        each = (sure - ours) / (n_sure - count)
        bare = a_token * max(map(sum, lengths))
        ratios.append((bare + each * n_sure) / (bare + each * count))
    return round(statistics.median(ratios), 2)


def main() -> None:
    """Measure, print, compare with the claim, and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(SHAPES), help="only this model; writes nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts = fixed_counts()
    processes = RankProcesses(2, tuple(LAYOUTS.values()), seconds=600.0)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in [name for name in SHAPES if given.case in (None, name)]:
            model = tiny.save(Path(folder) / case, "qwen3", **SHAPES[case])
            for name, layout in LAYOUTS.items():
                seconds = processes.run(run, case, model, layout, counts)[0]
                ratios = {kind: ratio_of(seconds[kind], seconds["budget"]) for kind in counts}
                limit = limit_of(model, seconds, counts["sure"], layout.mesh.n_devices)
                verdict = "PASS" if ratios["sure"] >= TARGET else "FAIL"
                print(
                    f"{verdict} {case:>5} {name:>12}, a budget of {BUDGET} tokens: {ratios} x, wanted {TARGET}, "
                    f"limit {limit}",
                    flush=True,
                )
                row = {"model": case, "layout": name, "ratios": ratios, "limit": limit, "claim": TARGET}
                found.append({**row, "seconds": seconds})
    processes.close()
    if given.case is None:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "fixed_counts": counts, "budget": BUDGET, "cases": found}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
