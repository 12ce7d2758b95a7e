"""Generation on two pipeline stages: two lanes of sequences against one, 30M parameters, one core each.

Run from the repository root: `OMP_NUM_THREADS=1 python -m benchmarks.generation_stages`. 32 sequences, all running at
once. One lane is what stages are without overlap: each waits for the other. The two take turns, and the median of the
rounds is kept. Wall time: other work on the machine distorts it.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.context_parallel import SHAPE
from benchmarks.machine import describe
from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import OwnWeights, Request, RolloutLimits
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.rollout import StagedRollout
from tests import tiny
from tests.ranks import RankProcesses, joined

RESULTS = Path(__file__).parent / "results" / "generation_stages.json"
PP2 = Layout(DeviceMesh(0, 2), pp=2)
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 48
ROUNDS = 3


def tokens_per_second(ranks: LayoutRanks, folder: Path, lanes: int) -> float:
    """New tokens a second, on the head; 0 elsewhere."""
    groups, rng, rate = joined[0].of_layout(PP2), random.Random(0), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedRollout, "lanes", lanes)
        source = OwnWeights(str(folder), torch.device("cpu"))
        role = ModelRole(path="x", dtype="float32")
        engine = open_rollout(role, source, RolloutLimits(), lambda tokens: "", lambda: None, groups)
        ranks.mesh.barrier()
        if groups.heads:
            prompts = [tuple(rng.randrange(1, 4096) for _ in range(PROMPT_TOKENS)) for _ in range(SEQUENCES)]
            started, done = time.perf_counter(), 0
            engine.submit([Request(i, prompt, NEW_TOKENS, seed=i) for i, prompt in enumerate(prompts)])
            while done < SEQUENCES:
                done += len(engine.take(60.0))
            rate = SEQUENCES * NEW_TOKENS / (time.perf_counter() - started)
            engine.pause()
            engine.dismiss()
        else:
            engine.pause()
            engine.follow()
        ranks.mesh.barrier()
        assert engine.close(10.0)
    return rate


def main() -> None:
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save(Path(folder) / "model", "qwen3", **SHAPE)
        processes = RankProcesses(2, [PP2])
        for _ in range(ROUNDS):
            for lanes, found in rates.items():
                found.append(max(processes.run(tokens_per_second, model, lanes)))
        processes.close()
    one, two = (statistics.median(found) for found in rates.values())
    result = {"one_lane": round(one), "two_lanes": round(two), "ratio": round(two / one, 2), "machine": describe()}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"one lane {one:.0f} tokens/s, two lanes {two:.0f}: {two / one:.2f}x")


if __name__ == "__main__":
    main()
