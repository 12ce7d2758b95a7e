"""Seconds to bring 400 MB of weights from one layout to another, and into and out of a checkpoint, beside other ways.

Two processes on this machine, and four, all contenders in turn in every round. Run `OMP_NUM_THREADS=1 python -m
benchmarks.reallocation`. What counts is the median over rounds of the ratio within a round: absolute times depend on
the machine. `memcpy` copies in each process as many bytes as lie there afterwards; files are in /dev/shm. Beside each
verdict stands the limit, where there is one: of a reallocation, what its copies alone reach, all in one call, with
nobody to wait for (rows that are cut by columns go in short runs); of a save, how much faster two processes are than
one that do nothing but write files. How much faster two are that do nothing but copy is printed, too: where other work
takes the machine's cores, not at all.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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

ROUNDS = 7
RESULTS = Path(__file__).parent / "results" / "reallocation.json"
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000, "head_dim": 64}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False}  # 106M in float32
MESH, FOUR = DeviceMesh(0, 2), DeviceMesh(0, 4)
LAYOUTS = {"dp2": Layout(MESH, dp=2), "fsdp2": Layout(MESH, dp=2, sharding="fsdp"), "tp2": Layout(MESH, tp=2)}
LAYOUTS |= {"tp2 pp2": Layout(FOUR, tp=2, pp=2), "dp4": Layout(FOUR, dp=4)}
MOVES = (("dp2", "tp2"), ("fsdp2", "tp2"), ("tp2", "dp2"), ("fsdp2", "dp2"))
SAVED = ("dp2", "fsdp2", "tp2")
CASES = {2: (*MOVES, *SAVED), 4: (("tp2 pp2", "dp4"),)}  # by processes
WHOLE = ("dp2", "fsdp2")  # whose tensors torch's checkpoints know the cuts of
ALONE = (0,)  # the writers where one writes all
PATIENCE_SECONDS = 300.0
PIECE = 1 << 21  # bytes of a bare write
# bytes of files that each process writes and deletes before each turn with a checkpoint: pages that have lain unused go
# back to the machine beneath a virtual one, and to take them again costs several times as much as to fill them
FRESH = 1 << 29


class Verdict(NamedTuple):
    """Ours shall be at least `least` times as fast as `theirs`. limit: two contenders between whom nobody could do
    better."""

    ours: str
    theirs: str
    least: float
    limit: tuple[str, str] | None = None


MOVE_TARGETS = tuple(
    Verdict("reallocation", theirs, least, ("copies", theirs))
    for theirs, least in {"memcpy": 0.8, "safetensors": 5.0, "broadcast": 5.0, "torch dcp": 5.0}.items()
)
SAVE_TARGETS = (
    Verdict("save", "save, one writer", 1.5, ("bare write", "bare write, one process")),
    Verdict("save", "dcp save", 1.0),
    Verdict("load", "dcp load", 1.0),
)
COPIES = ("bare copy", "bare copy, one process")

# --- in all processes -------------------------------------------------------------------------------------------------

_engines: dict[str, TorchTrainEngine] = {}
_routes: dict[tuple[str, str], MappedRoute] = {}


def opened(name: str, folder: Path) -> TorchTrainEngine:
    """The engine of a layout; each process keeps those that it has opened."""
    if name not in _engines:
        ranks = joined[0].of_layout(LAYOUTS[name])
        _engines[name] = open_engine(ModelRole(), str(folder), LAYOUTS[name], ranks, TrainSettings(shared=True))
    return _engines[name]


def timed(ranks: LayoutRanks, turn: Callable[[], object]) -> float:
    """Seconds until all processes have ended their turns."""
    ranks.mesh.barrier()
    began = time.perf_counter()
    turn()
    ranks.mesh.barrier()
    return time.perf_counter() - began


def local_values(engine: TorchTrainEngine) -> dict[str, Tensor]:
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
    worker, into, leads = ranks.mesh.rank, local_values(target), ranks.mesh.rank == 0
    copy = {name: tensor.clone() for name, tensor in into.items()}
    whole = {name: torch.ones(shape) for name, shape in shapes.items()}
    with source.local_parts() as parts:
        place = WorkerParts(worker, source.device, parts, moves.wants[worker], source.segment)
        found = list(route.bring(place))  # where they lie
        route.settle()
    places = [into[name][box.within(place.wants[name]).slices] for name, box, _ in found]

    def ours() -> None:
        with source.local_parts() as parts:
            target.load_weights(route.bring(place._replace(holds=parts)), n)
            route.settle()

    def copies() -> None:
        torch._foreach_copy_(places, [part.values for part in found])  # pyright: ignore[reportPrivateImportUsage]

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

    turns: dict[str, Callable[[], object]] = {"reallocation": ours, "copies": copies, "memcpy": memcpy}
    turns["broadcast"] = broadcast
    turns["safetensors"] = through_files
    if names[0] in WHOLE:
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
        turns |= bare(ranks, list(local_values(engine).values()), files)
    turns["load"] = lambda: engine.load(files / "ours")
    if name in WHOLE:
        state = sharded(engine)
        turns["dcp save"] = lambda: dcp.save(state, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)
        turns["dcp load"] = lambda: dcp.load(state, checkpoint_id=str(files / f"dcp{n}"), no_dist=False)
    return in_turn(ranks, turns, lambda: use_pages(files / f"used{ranks.mesh.rank}"))


def bare(ranks: LayoutRanks, tensors: Sequence[Tensor], files: Path) -> dict[str, Callable[[], object]]:
    """Writing and copying as many bytes, by two processes half of them each, and by one."""
    place, rank = torch.cat([tensor.view(-1) for tensor in tensors]), ranks.mesh.rank
    copy, middle = torch.zeros_like(place), place.numel() // 2
    own = slice(0, middle) if rank == 0 else slice(middle, None)

    def write(part: Tensor, name: str) -> None:
        data = part.numpy().data.cast("B")
        with (files / name).open("wb", buffering=0) as file:
            for first in range(0, len(data), PIECE):
                file.write(data[first : first + PIECE])

    return {
        "bare write": lambda: write(place[own], f"bare{rank}"),
        "bare write, one process": lambda: write(place, "bare") if rank == 0 else None,
        "bare copy": lambda: copy[own].copy_(place[own]),
        "bare copy, one process": lambda: copy.copy_(place) if rank == 0 else None,
    }


def in_turn(
    ranks: LayoutRanks, turns: Mapping[str, Callable[[], object]], before: Callable[[], None] | None = None
) -> dict[str, float]:
    """Each contender's seconds. What reads files follows what writes them. before: what comes before each turn."""
    found = {}
    with torch.no_grad():
        for name, turn in turns.items():
            if before is not None:
                before()
            found[name] = timed(ranks, turn)
    return found


def use_pages(file: Path) -> None:
    """Write a file and delete it again: the pages of the next one come from what has been used just now."""
    with file.open("wb", buffering=0) as out:
        for _ in range(FRESH // PIECE):
            out.write(bytes(PIECE))
    file.unlink()


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds: case -> contender -> one figure a round; the first round warms up and does not count."""
    found: dict[str, dict[str, list[float]]] = {}
    base = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        folder = tiny.save(base / "model", "llama", **SIZES)
        for n_processes, cases in CASES.items():
            layouts = tuple(layout for layout in LAYOUTS.values() if layout.mesh.n_devices == n_processes)
            processes = RankProcesses(n_processes, layouts, PATIENCE_SECONDS)
            try:
                for n in range(rounds + 1):
                    for case in cases:
                        taken = measured(processes, case, (folder, base / "files", n))
                        named = found.setdefault(name_of(case), {})
                        for contender, seconds in taken.items():
                            named.setdefault(contender, []).extend([seconds] if n else [])
            finally:
                processes.close()
    finally:
        shutil.rmtree(base)
    return found


def measured(processes: RankProcesses, case: tuple[str, str] | str, place: tuple[Path, Path, int]) -> dict[str, float]:
    """One round of a case: contender -> seconds. place: the model, the folder for files, and the round."""
    folder, files, n = place
    files.mkdir()
    per_rank = processes.run(move if isinstance(case, tuple) else checkpoint, folder, case, files, n)
    shutil.rmtree(files)
    return {contender: max(one[contender] for one in per_rank) for contender in per_rank[0]}


def name_of(case: tuple[str, str] | str) -> str:
    return " -> ".join(case) if isinstance(case, tuple) else f"checkpoint {case}"


def judge(found: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """Every target with what was reached: the median over rounds of the ratio within the round."""
    verdicts = []
    for case, seconds in found.items():
        for ours, theirs, least, limit in SAVE_TARGETS if case.startswith("checkpoint") else MOVE_TARGETS:
            if theirs in seconds:
                reached = ratio(seconds, ours, theirs)
                one = {"what": f"{case}: {ours} against {theirs}", "reached": reached, "target": least}
                one |= {"limit": ratio(seconds, *limit)} if limit is not None else {}
                verdicts.append(one | {"pass": reached >= least})
    return verdicts


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """The median over rounds of theirs over ours within the round: how fast ours is beside theirs."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


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
        limit = f", limit {one['limit']:.2f}x" if "limit" in one else ""
        verdict = "PASS" if one["pass"] else "FAIL"
        print(f"{verdict}  {one['what']}: {one['reached']:.2f}x (target {one['target']}x{limit})")
    copying = {case: ratio(seconds, *COPIES) for case, seconds in found.items() if COPIES[0] in seconds}
    for case, reached in copying.items():
        print(f"{case}: {COPIES[0]} against {COPIES[1]}: {reached:.2f}x")
    if rounds >= ROUNDS:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "rounds": rounds, "verdicts": verdicts, "two_copy": copying}
        report["median_seconds"] = medians
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
