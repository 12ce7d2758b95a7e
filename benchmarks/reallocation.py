"""Seconds to bring 400 MB of weights from one layout to another, and into and out of a checkpoint, beside other ways.

Two processes on this machine, all contenders in turn in every round. Run `OMP_NUM_THREADS=1 python -m
benchmarks.reallocation`. What counts is the median over rounds of the ratio within a round: absolute times depend on
the machine. `memcpy` copies in each process as many bytes as lie there afterwards; files are in /dev/shm.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.machine import describe
from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.parallel.exchange import WorkerParts, reallocation
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from tests import tiny
from tests.ranks import RankProcesses, joined

ROUNDS = 3
RESULTS = Path(__file__).parent / "results" / "reallocation.json"
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000, "head_dim": 64}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False}  # 106M in float32
MESH = DeviceMesh(0, 2)
LAYOUTS = {"dp2": Layout(MESH, dp=2), "fsdp2": Layout(MESH, dp=2, sharding="fsdp"), "tp2": Layout(MESH, tp=2)}
MOVES = (("dp2", "tp2"), ("fsdp2", "tp2"), ("tp2", "dp2"), ("fsdp2", "dp2"))
SAVED = ("dp2", "fsdp2", "tp2")
ALONE = (0,)  # the writers where one writes all


class Verdict(NamedTuple):
    """Ours shall be at least `least` times as fast as `theirs`."""

    ours: str
    theirs: str
    least: float


MOVE_TARGETS = (
    Verdict("reallocation", "memcpy", 0.8),
    Verdict("reallocation", "safetensors", 5.0),
    Verdict("reallocation", "broadcast", 5.0),
    Verdict("reallocation", "torch dcp", 5.0),
)
SAVE_TARGETS = (
    Verdict("save", "save, one writer", 1.5),
    Verdict("save", "dcp save", 1.0),
    Verdict("load", "dcp load", 1.0),
)

# --- in both processes ------------------------------------------------------------------------------------------------

_engines: dict[str, TorchTrainEngine] = {}
_routes: dict[tuple[str, str], MappedRoute] = {}


def opened(name: str, folder: Path) -> TorchTrainEngine:
    """The engine of a layout; each process keeps those that it has opened."""
    if name not in _engines:
        ranks = joined[0].of_layout(LAYOUTS[name])
        _engines[name] = open_engine(ModelRole(), str(folder), LAYOUTS[name], ranks, TrainSettings(shared=True))
    return _engines[name]


def timed(ranks: LayoutRanks, turn: Callable[[], object]) -> float:
    """Seconds until both processes have ended their turns."""
    ranks.mesh.barrier()
    began = time.perf_counter()
    turn()
    ranks.mesh.barrier()
    return time.perf_counter() - began


def held(engine: TorchTrainEngine) -> dict[str, Tensor]:
    """The weights that lie here, by name."""
    return {name: part.values for name, part in engine.contents.weights.items()}


def sharded(engine: TorchTrainEngine) -> dict[str, Any]:
    """The parameters as torch's own distributed checkpoints take them: DTensors, else whole tensors."""
    return dict(engine.model.network.named_parameters())


def move(ranks: LayoutRanks, folder: Path, names: tuple[str, str], files: Path, n: int) -> dict[str, float]:
    """One round of one reallocation: contender -> seconds."""
    source, target = (opened(name, folder) for name in names)
    model = spec_from_config(source.model.config.to_dict(), Where()), source.model.head
    shapes = {spec.name: spec.shape for spec in source.weight_specs()}
    between = LAYOUTS[names[0]], LAYOUTS[names[1]]
    moves = reallocation(shapes, torch.float32, between, joined[0].member, model)
    route = _routes.setdefault(names, MappedRoute(moves, ranks.mesh.rank, joined[0].member.host))
    worker, into, leads = ranks.mesh.rank, held(target), ranks.mesh.rank == 0
    copy = {name: tensor.clone() for name, tensor in into.items()}
    whole = {name: torch.empty(shape) for name, shape in shapes.items()}

    def ours() -> None:
        with source.held_parts() as parts:
            place = WorkerParts(worker, source.device, parts, moves.wants[worker], source.segment)
            target.load_weights(route.bring(place), n)

    def memcpy() -> None:
        for name, tensor in into.items():
            copy[name].copy_(tensor)

    def broadcast() -> None:
        for tensor in whole.values():
            dist.broadcast(tensor, 0)

    def through_files() -> None:
        if leads:
            save_file(whole, files / "whole.safetensors")
        ranks.mesh.barrier()
        found = load_file(files / "whole.safetensors")
        for name, part in target.contents.weights.items():
            part.values.copy_(found[name][part.box.slices])

    turns: dict[str, Callable[[], object]] = {"reallocation": ours, "memcpy": memcpy, "broadcast": broadcast}
    turns["safetensors"] = through_files
    if names[0] != "tp2":  # whose cuts its tensors do not know
        state, loaded = sharded(source), {name: torch.empty(shape) for name, shape in shapes.items()}

        def through_dcp() -> None:
            dcp.save(state, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)
            dcp.load(loaded, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)

        turns["torch dcp"] = through_dcp
    return in_turn(ranks, turns)


def checkpoint(ranks: LayoutRanks, folder: Path, name: str, files: Path, n: int) -> dict[str, float]:
    """One round of saving and loading under one layout: contender -> seconds."""
    engine = opened(name, folder)
    turns: dict[str, Callable[[], object]] = {"save": lambda: engine.save(files / "ours")}
    if name == "dp2":
        part = engine.snapshot()
        turns["save, one writer"] = lambda: part.write(files / "one", ALONE) if ranks.mesh.rank == 0 else None
    turns["load"] = lambda: engine.load(files / "ours")
    if name != "tp2":
        state = sharded(engine)
        turns["dcp save"] = lambda: dcp.save(state, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)
        turns["dcp load"] = lambda: dcp.load(state, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)
    return in_turn(ranks, turns)


def in_turn(ranks: LayoutRanks, turns: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Each contender's seconds. What reads files follows what writes them."""
    with torch.no_grad():
        return {name: timed(ranks, turn) for name, turn in turns.items()}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds: case -> contender -> one figure a round; the first round warms up and does not count."""
    found: dict[str, dict[str, list[float]]] = {}
    processes = RankProcesses(2, tuple(LAYOUTS.values()))
    base = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        folder = tiny.save(base / "model", "llama", **SIZES)
        for n in range(rounds + 1):
            for case in (*MOVES, *SAVED):
                files = base / "files"
                files.mkdir()
                run = move if isinstance(case, tuple) else checkpoint
                per_rank = processes.run(run, folder, case, files, n)
                shutil.rmtree(files)
                named = found.setdefault(" -> ".join(case) if isinstance(case, tuple) else f"checkpoint {case}", {})
                for contender in per_rank[0]:
                    taken = max(one[contender] for one in per_rank)
                    named.setdefault(contender, []).extend([taken] if n else [])
    finally:
        processes.close()
        shutil.rmtree(base)
    return found


def judge(found: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """Every target with what was reached: the median over rounds of the ratio within the round."""
    verdicts = []
    for case, seconds in found.items():
        for ours, theirs, least in SAVE_TARGETS if case.startswith("checkpoint") else MOVE_TARGETS:
            if theirs in seconds:
                ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
                what = f"{case}: {ours} against {theirs}"
                verdicts.append({"what": what, "reached": ratio, "target": least, "pass": ratio >= least})
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer than the default: writes nothing")
    rounds = parser.parse_args().rounds
    found = measure(rounds)
    verdicts = judge(found)
    medians = {case: {name: statistics.median(taken) for name, taken in some.items()} for case, some in found.items()}
    for case, some in medians.items():
        print(f"{case:18}" + "".join(f"{name} {seconds * 1e3:,.0f} ms   " for name, seconds in some.items()))
    for one in verdicts:
        print(f"{'PASS' if one['pass'] else 'FAIL'}  {one['what']}: {one['reached']:.2f}x (target {one['target']}x)")
    if rounds >= ROUNDS:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "rounds": rounds, "verdicts": verdicts, "median_seconds": medians}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
