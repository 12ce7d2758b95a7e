"""Decode steps of one replica under layouts, 30M parameters, one core a process: tp 2 and pp 2 against one process.

Run from the repository root: `OMP_NUM_THREADS=1 python -m benchmarks.generation_layouts`. All sequences run at once and
are equally long. Two pipeline stages, of one chunk and of two, are measured with two lanes of sequences, and with one:
each stage waits for the other then. The layouts take turns, and the median of the rounds is kept. Wall time: other work
on the machine distorts it. A step of one sequence reads every weight once: beside it stands the share of the bytes a
second that one thread reads of plain memory.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.context_parallel import SHAPE
from benchmarks.machine import describe
from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import OwnWeights, Request, RolloutLimits
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from realgraph.runtime.parallel.pipeline.rollout import StagedRollout
from tests import tiny
from tests.ranks import RankProcesses, joined

RESULTS = Path(__file__).parent / "results" / "generation_layouts.json"
ONE, TP2, PP2 = Layout(DeviceMesh(0, 1)), Layout(DeviceMesh(0, 2), tp=2), Layout(DeviceMesh(0, 2), pp=2)
CHUNKS = Layout(DeviceMesh(0, 2), pp=2, stages=((3, 3), (2, 2)))
CONTENDERS = {
    **{"one process": (ONE, 1), "tp2": (TP2, 1), "pp2, one lane": (PP2, 1), "pp2, two lanes": (PP2, 2)},
    **{"pp2 x2, one lane": (CHUNKS, 1), "pp2 x2, two lanes": (CHUNKS, 2)},
}
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 48
ROUNDS = 3
TP_TARGET = 2.2  # seconds of a step of tp2 over those of one process, at most
COUNTED_SEQUENCES, COUNTED_STEPS = 4, 16
READ_BYTES = 512 << 20


def collectives(ranks: LayoutRanks, folder: Path, name: str, new_tokens: int) -> int:
    """Collectives that this worker takes part in until a few sequences have so many new tokens each."""
    counted, guard = [0], Ranks._guard

    def counting(group: Ranks, what: str, call: Any) -> Any:
        counted[0] += 1
        return guard(group, what, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_guard", counting)
        step_seconds(ranks, folder, name, COUNTED_SEQUENCES, new_tokens)
    return counted[0]


def step_seconds(ranks: LayoutRanks, folder: Path, name: str, sequences: int, new_tokens: int = NEW_TOKENS) -> float:
    """Seconds of a decode step, on the head; 0 elsewhere."""
    layout, lanes = CONTENDERS[name]
    if ranks.mesh.rank not in layout.mesh.devices:
        return 0.0
    groups = joined[0].of_layout(layout) if layout.mesh.n_devices > 1 else LayoutRanks.alone(ranks.device)
    rng, seconds = random.Random(0), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedRollout, "lanes", lanes)
        source = OwnWeights(str(folder), torch.device("cpu"))
        role = ModelRole(path="x", dtype="float32")
        engine = open_rollout(role, source, RolloutLimits(), lambda tokens: "", lambda: None, groups)
        groups.mesh.barrier()
        if groups.heads:
            prompts = [tuple(rng.randrange(1, 4096) for _ in range(PROMPT_TOKENS)) for _ in range(sequences)]
            started, done = time.perf_counter(), 0
            engine.submit([Request(i, prompt, new_tokens, seed=i) for i, prompt in enumerate(prompts)])
            while done < sequences:
                done += len(engine.take(60.0))
            seconds = (time.perf_counter() - started) / new_tokens
            engine.pause()
            engine.dismiss()
        else:
            engine.pause()
            engine.follow()
        groups.mesh.barrier()
        assert engine.close(10.0)
    return seconds


def read_bytes_per_second() -> float:
    """The rate at which one thread reads plain memory: the best of three."""
    data = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - started)
    return READ_BYTES / min(seconds)


def main() -> None:
    """Measure, print, compare with the claim, and record."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    single: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save(Path(folder) / "model", "qwen3", **SHAPE)
        nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        processes = RankProcesses(2, [TP2, PP2, CHUNKS], seconds=600.0)
        for _ in range(ROUNDS):
            for name, found in seconds.items():
                found.append(max(processes.run(step_seconds, model, name, SEQUENCES)))
            single.append(max(processes.run(step_seconds, model, "one process", 1)))
        short, long = (
            max(processes.run(collectives, model, "tp2", tokens)) for tokens in (COUNTED_STEPS, 2 * COUNTED_STEPS)
        )
        processes.close()
    step = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found_seconds in step.items():
        rate = SEQUENCES / found_seconds
        ratio = step["one process"] / found_seconds
        print(f"{name:>16}: {1e3 * found_seconds:6.1f} ms a step, {rate:5.0f} tokens/s, {ratio:.2f} x one process")
    tp = step["tp2"] / step["one process"]
    print(f"{'PASS' if tp <= TP_TARGET else 'FAIL'} a step of tp2 takes {tp:.2f} x one process's, at most {TP_TARGET}")
    counted = (long - short) / COUNTED_STEPS
    expected = 2 * SHAPE["num_hidden_layers"] + 2  # two a layer, one for the draw, one header
    verdict = "PASS" if counted <= expected else "FAIL"
    print(f"{verdict} a step of tp2 has {counted:g} collectives, at most {expected}: two a layer, a draw, a header")
    lanes = {name: step[f"{name}, one lane"] / step[f"{name}, two lanes"] for name in ("pp2", "pp2 x2")}
    for name, ratio in lanes.items():
        print(f"two lanes on {name}: {ratio:.2f} x one lane")
    share = nbytes / statistics.median(single) / read_bytes_per_second()
    print(f"one sequence: {1e3 * statistics.median(single):.1f} ms a step, {share:.2f} of what memory gives one thread")
    report: dict[str, Any] = {
        "machine": describe(),
        "sequences": SEQUENCES,
        "seconds_of_a_step": step,
        "tp2_over_one_process": round(tp, 2),
        "target": TP_TARGET,
        "tp2_collectives_of_a_step": {"counted": counted, "target": expected},
        "two_lanes_over_one": {name: round(ratio, 2) for name, ratio in lanes.items()},
        "one_sequence": {"seconds": statistics.median(single), "share_of_memory_bandwidth": round(share, 2)},
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
