"""Training steps of long samples under cp 2 and dp 2, against one process: 30M parameters, one core each.

Run from the repository root: `OMP_NUM_THREADS=1 python -m benchmarks.context_parallel [--quick]`. One SFT step of the
same samples: forward, backward and AdamW. The layouts take turns, and the median of the rounds is kept. `cpu`: seconds
of the busiest rank's own threads, which others on the machine hardly change; waiting is not in them. `ideal`: what the
cut alone allows, tokens and pairs of tokens of one process over those of the busiest rank.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from realgraph.graphs.maths import CrossEntropy, Loss, TokenMean
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.parallel.context.shares import shares_of
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.scheduler.placement import balance
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from tests import tiny
from tests.ranks import RankProcesses, joined

RESULTS = Path(__file__).parent / "results" / "context_parallel.json"
LAYOUTS = {
    "one": Layout(DeviceMesh(0, 1)),
    "dp2": Layout(DeviceMesh(0, 2), dp=2),
    "cp2": Layout(DeviceMesh(0, 2), cp=2),
}
BATCHES = {
    "one sample of 1,536 tokens": (1536,),
    "long-tailed, 2,048 tokens": (1024, 400, 200, 152, 101, 71, 50, 30, 20),
}
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
CALL = Train(model="actor", loss=Loss({"nll": CrossEntropy()}, TokenMean()), lr=1e-4)
DEADLINE_SECONDS = 600.0
ROUNDS = 3

_engines: dict[str, TorchTrainEngine] = {}  # of a worker, by layout


def step_seconds(ranks: LayoutRanks, name: str, folder: Path, lengths: Sequence[int]) -> tuple[float, float]:
    """One worker's seconds of a step, by the clock and of its threads; 0 where the layout leaves it out."""
    layout = LAYOUTS[name]
    if ranks.mesh.rank not in layout.mesh.devices:
        return 0.0, 0.0
    if name not in _engines:
        settings = TrainSettings(max_tokens_per_microbatch=4096, optimizer=Optimizer(), total_steps=100)
        here = joined[0].of_layout(layout)
        _engines[name] = open_engine(ModelRole(trainable=True, dtype="float32"), str(folder), layout, here, settings)
    engine = _engines[name]
    mine = balance(lengths, layout.dp)[engine.ranks.dp.rank]
    batch = _batch(lengths).select(mine)
    engine.ranks.mesh.barrier()
    started, worked = time.perf_counter(), time.process_time()
    engine.train(CALL, [batch])
    return time.perf_counter() - started, time.process_time() - worked


def _batch(lengths: Sequence[int]) -> Packed:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, SHAPE["vocab_size"], (sum(lengths),), generator=draw)
    return Packed(tokens, tuple(lengths), torch.ones(len(tokens), dtype=torch.bool), tuple(range(len(lengths))))


def ideal(lengths: Sequence[int]) -> dict[str, float]:
    """The speed-up that the cut over two ranks allows."""
    shares = shares_of(lengths, 2)
    tokens = max(share.n_tokens(lengths) for share in shares)
    pairs = max(
        sum(lengths[i] ** 2 for i in share.whole) + sum(c.stop**2 - c.start**2 for c in share.chunks)
        for share in shares
    )
    return {"tokens": round(sum(lengths) / tokens, 3), "pairs": round(sum(n * n for n in lengths) / pairs, 3)}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of batch."""
    processes = RankProcesses(2, tuple(LAYOUTS.values()), DEADLINE_SECONDS)
    rows = []
    try:
        for kind, lengths in BATCHES.items():
            seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LAYOUTS}
            for turn in range(rounds + 1):  # the first one warms up
                for name, found in seconds.items():
                    wall, cpu = zip(*processes.run(step_seconds, name, folder, lengths), strict=True)
                    found += [(max(wall), max(cpu))] * (turn > 0)
            row: dict[str, Any] = {"batch": kind, "ideal": ideal(lengths)}
            for at, clock in enumerate(("wall", "cpu")):
                medians = {name: statistics.median(one[at] for one in found) for name, found in seconds.items()}
                row[f"{clock}_seconds"] = {name: round(median, 3) for name, median in medians.items()}
                row[f"{clock}_speedup"] = {name: round(medians["one"] / medians[name], 3) for name in ("dp2", "cp2")}
            rows.append(row)
            print(json.dumps(row))
    finally:
        processes.close()
    return rows


def main() -> None:
    """Measure and record; `--quick`: one round, not recorded."""
    quick = "--quick" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as home:
        folder = tiny.save(Path(home) / "model", "qwen3", **SHAPE)
        rows = measure(folder, 1 if quick else ROUNDS)
    if not quick:
        RESULTS.write_text(json.dumps({"machine": describe(), "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
