"""Seconds that generation and training stand still while new weights go from one to the other, and bytes a second.

Two processes on this machine, one trains, one generates all the time. Run `OMP_NUM_THREADS=1 python -m
benchmarks.weight_channel`. `in place`: generation is paused while the new weights overwrite the old. `beside`: they
come while it goes on, and it switches at a token. Each once with the trainer's memory read where it lies (`shared`),
once with messages (`gloo`). Generation stands still for the longest time between the ends of two decode steps, less
that of a usual step under the same load. Caches are computed again in all of them. Training stands still while it sends
or says that its weights are final, and once more before its next optimizer step, after a forward pass, until they are
read. `at once`: it waits for that with nothing in between.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import describe
from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import OwnWeights, Request, RolloutLimits, TrainSettings
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.models.weights import local_parts
from realgraph.runtime.parallel.exchange import Reallocation, WorkerParts, reallocation
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from tests import tiny
from tests.ranks import RankProcesses, joined

ROUNDS = 5
RESULTS = Path(__file__).parent / "results" / "weight_channel.json"
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 16000, "head_dim": 64}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False}
LAYOUTS = (Layout(DeviceMesh(0, 1)), Layout(DeviceMesh(1, 1)))  # of training, of generation
MODES = ("in place, gloo", "in place, shared", "beside, gloo", "beside, shared at once", "beside, shared")
LEAST_OF_MEMCPY = 0.6
PROMPT, NEW_TOKENS, SAMPLES = tuple(range(5, 37)), 100_000, 2
PASS_LENGTHS = [128] * 4  # tokens of the samples of a forward pass of training


class Opened(NamedTuple):
    """The engines and routes of a process, from round to round."""

    trainer: TorchTrainEngine | None
    rollouts: Mapping[str, TorchRolloutEngine]
    moves: Reallocation
    routes: Mapping[str, MappedRoute]


_opened: list[Opened] = []


def opened(rank: int, folder: Path) -> Opened:
    """The engine of this process and its routes; made once."""
    if not _opened:
        groups, device = joined[0].of_layout(LAYOUTS[rank]), torch.device("cpu")
        trainer, rollouts = None, dict[str, TorchRolloutEngine]()
        if rank == 0:
            trainer = open_engine(ModelRole(), str(folder), LAYOUTS[0], groups, TrainSettings(shared=True))
            shapes = {spec.name: spec.shape for spec in trainer.weight_specs()}
        else:
            for way in ("in place", "beside"):
                weights = OwnWeights(str(folder), device, beside=way == "beside")
                limits = RolloutLimits(max_length=NEW_TOKENS)
                rollouts[way] = open_rollout(ModelRole(), weights, limits, lambda _: "", lambda: None, groups)
            shapes = {spec.name: spec.shape for spec in rollouts["beside"].weight_specs()}
        model = spec_from_config(json.loads((folder / "config.json").read_text()), Where()), ModelRole().head
        moves = reallocation(shapes, torch.float32, LAYOUTS, joined[0].member, model)
        hosts = {"shared": "here", "gloo": f"host {rank}"}  # of another name: messages
        _opened.append(Opened(trainer, rollouts, moves, {way: MappedRoute(moves, rank, hosts[way]) for way in hosts}))
    return _opened[0]


class Steps:
    """The ends of an engine's decode steps."""

    def __init__(self, engine: TorchRolloutEngine) -> None:
        self.ends: list[float] = []
        self._batch, self._step = engine._batch, engine._batch.step
        engine._batch.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> Any:
        done = self._step()
        self.ends.append(time.perf_counter())
        return done

    def close(self) -> None:
        """Count no more."""
        self._batch.step = self._step  # type: ignore[method-assign]

    def standstill(self, began: float, ended: float) -> float:
        """Seconds between two of them from `began` to just after `ended`, at most, less the usual ones before."""
        gaps = list(zip(self.ends, self.ends[1:], strict=False))
        usual = statistics.median(b - a for a, b in gaps if b < began)
        return max(b - a for a, b in gaps if b > began and a < ended) - usual


def sent(here: Opened, route: str, passes: int) -> float:
    """Seconds that training stands still for an update of others. passes: forward passes before its optimizer step."""
    assert here.trainer is not None
    began = time.perf_counter()
    with here.trainer.local_parts() as local:
        for _ in here.routes[route].bring(WorkerParts(0, here.trainer.device, local, {}, here.trainer.segment)):
            pass
    announced = time.perf_counter()
    for _ in range(passes):
        here.trainer.inference(tiny.batch(PASS_LENGTHS, 1), "logprobs", 1.0)
    steps = time.perf_counter()
    here.routes[route].settle()
    return announced - began + time.perf_counter() - steps


def update(ranks: LayoutRanks, folder: Path, mode: str, version: int) -> dict[str, float]:
    """One update: what each side measures, in seconds."""
    way, how = mode.split(", ")
    rank, here = ranks.mesh.rank, opened(ranks.mesh.rank, folder)
    route = how.split()[0]
    if here.trainer is not None:
        ranks.mesh.barrier()
        taken = sent(here, route, passes=0 if how.endswith("at once") else 1)
        ranks.mesh.barrier()
        return {"training": taken}
    engine, steps = here.rollouts[way], Steps(here.rollouts[way])
    engine.submit([Request(i, PROMPT, NEW_TOKENS - 100, seed=i) for i in range(SAMPLES)])
    while len(steps.ends) < 20:
        time.sleep(0.01)
    ranks.mesh.barrier()
    began = time.perf_counter()
    if way == "in place":
        engine.pause()
    place = WorkerParts(rank, engine.device, {}, here.moves.wants[rank])
    engine.prepare(here.routes[route].bring(place))
    came = time.perf_counter()
    engine.switch(version)
    engine.resume()
    ended, n = time.perf_counter(), len(steps.ends)
    while len(steps.ends) < n + 3:
        time.sleep(0.01)
    engine.abort(range(SAMPLES))
    steps.close()
    ranks.mesh.barrier()
    return {"generation": steps.standstill(began, ended), "transfer": came - began}


def memcpy(ranks: LayoutRanks, folder: Path) -> dict[str, float]:
    """A copy of all weights where nothing else runs: seconds, and their bytes."""
    here = opened(ranks.mesh.rank, folder)
    ranks.mesh.barrier()
    if not here.rollouts:
        ranks.mesh.barrier()
        return {}
    tensors = [part.values for part in local_parts(here.rollouts["beside"]._batch._model.module).values()]
    into = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
    began = time.perf_counter()
    for a, b in zip(into, tensors, strict=True):
        a.copy_(b)
    taken = time.perf_counter() - began
    ranks.mesh.barrier()
    return {"memcpy": taken, "bytes": float(sum(tensor.nbytes for tensor in tensors))}


def idle(ranks: LayoutRanks, folder: Path, route: str) -> dict[str, float]:
    """Seconds of a transfer while nothing is generated."""
    here, rank = opened(ranks.mesh.rank, folder), ranks.mesh.rank
    ranks.mesh.barrier()
    began = time.perf_counter()
    if here.trainer is not None:
        sent(here, route, passes=0)
    else:
        engine = here.rollouts["beside"]
        engine.prepare(here.routes[route].bring(WorkerParts(rank, engine.device, {}, here.moves.wants[rank])))
    taken = time.perf_counter() - began
    ranks.mesh.barrier()
    return {f"idle, {route}": taken}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds by what was measured, one figure a round; the first round warms up and does not count."""
    found: dict[str, list[float]] = {}
    processes = RankProcesses(2, LAYOUTS, seconds=300.0)
    base = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        folder = tiny.save(base / "model", "llama", **SIZES, max_position_embeddings=NEW_TOKENS, eos_token_id=None)
        for n in range(rounds + 1):
            figures: dict[str, float] = {}
            for answer in processes.run(memcpy, folder):
                figures |= answer
            for route in ("shared", "gloo"):
                figures |= processes.run(idle, folder, route)[1]
            for mode in MODES:
                for answer in processes.run(update, folder, mode, n + 1):
                    figures |= {f"{mode}: {name}": value for name, value in answer.items()}
            for name, value in figures.items():
                found.setdefault(name, []).extend([value] if n else [])
    finally:
        processes.close()
        shutil.rmtree(base)
    return found


def main() -> None:
    """Measure, print, judge, write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer than the default: writes nothing")
    rounds = parser.parse_args().rounds
    found = measure(rounds)
    size = found.pop("bytes")[0]
    for name, values in found.items():
        middle = statistics.median(values)
        rate = f"  {size / middle / 1e9:5.1f} GB/s" if name.startswith(("memcpy", "idle")) else ""
        print(f"{name:32s} {1e3 * middle:8.1f} ms  ({1e3 * min(values):.1f} to {1e3 * max(values):.1f}){rate}")
    shares = [a / b for a, b in zip(found["memcpy"], found["idle, shared"], strict=True)]
    reached = statistics.median(shares) >= LEAST_OF_MEMCPY
    print(f"{'PASS' if reached else 'FAIL'}: {statistics.median(shares):.2f} of memcpy, at least {LEAST_OF_MEMCPY}")
    record = {"machine": describe(), "bytes": size, "seconds": found, "share_of_memcpy": statistics.median(shares)}
    if rounds >= ROUNDS:
        RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    raise SystemExit(0 if reached else 1)


if __name__ == "__main__":
    main()
