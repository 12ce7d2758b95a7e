"""Reallocations between engines of real processes, by messages and out of shared memory: bit for bit a copy, with the
least bytes, the messages in two buckets."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist

from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages
from realgraph.runtime.engine import TrainEngine, TrainSettings
from realgraph.runtime.parallel import exchange as exchanges
from realgraph.runtime.parallel.checksums import Checksums, WeightsDiffer
from realgraph.runtime.parallel.collectives.peers import wait_for
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.cuts import layout_boxes, rows
from realgraph.runtime.parallel.exchange import (
    Reallocation,
    WeightPart,
    WorkerParts,
    exchange,
    reallocation,
)
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.routes import rounds
from realgraph.runtime.parallel.shares import shares
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.offload import OffloadedEngine
from realgraph.runtime.worker.failures import failure
from tests import tiny
from tests.engines import CPU, OPTIMIZER, call
from tests.ranks import RankProcesses, joined

Sharding = Literal["replicated", "fsdp"]
BUCKET = 1024  # bytes: smaller than most tensors


def layout(first: int, n: int, sharding: Sharding = "replicated") -> Layout:
    return Layout(DeviceMesh(first, n), dp=n, sharding=sharding)


def tensor(first: int, n: int, dp: int = 1, sharding: Sharding = "replicated") -> Layout:
    return Layout(DeviceMesh(first, n), dp=dp, tp=n // dp, sharding=sharding)


def context(first: int, n: int, dp: int = 1, sharding: Sharding = "replicated") -> Layout:
    return Layout(DeviceMesh(first, n), dp=dp, cp=n // dp, sharding=sharding)


def staged(first: int, n: int, pp: int = 2, sharding: Sharding = "replicated", stages: Stages = ()) -> Layout:
    """dp what the stages leave of the devices."""
    return Layout(DeviceMesh(first, n), dp=n // pp, pp=pp, sharding=sharding, stages=stages)


def experts(first: int, n: int, ep: int, tp: int = 1, sharding: Sharding = "replicated") -> Layout:
    return Layout(DeviceMesh(first, n), dp=n // tp, tp=tp, ep=ep, sharding=sharding)


class Case(NamedTuple):
    source: Layout
    target: Layout
    model: str
    dtype: Any = "float32"
    offloaded: bool = False


CASES = {
    "dp2 to 1": Case(layout(0, 2), layout(2, 1), "llama"),
    "dp2 to 2 others": Case(layout(0, 2), layout(2, 2), "qwen3"),
    "1 to dp2": Case(layout(3, 1), layout(0, 2), "qwen3"),
    "1 to dp3 with itself": Case(layout(1, 1), layout(0, 3), "qwen3", "bfloat16"),
    "fsdp2 to whole ones": Case(layout(0, 2, "fsdp"), layout(2, 2), "llama", "bfloat16"),
    "fsdp2 to its own workers": Case(layout(0, 2, "fsdp"), layout(0, 2), "qwen3"),
    "fsdp2 to fsdp2, the same": Case(layout(1, 2, "fsdp"), layout(1, 2, "fsdp"), "qwen3", "bfloat16"),
    "fsdp2 to fsdp2, overlapping": Case(layout(0, 2, "fsdp"), layout(1, 2, "fsdp"), "llama", "float16"),
    "fsdp3 to fsdp2": Case(layout(0, 3, "fsdp"), layout(2, 2, "fsdp"), "gemma2", "bfloat16"),
    "dp2 to fsdp3": Case(layout(0, 2), layout(1, 3, "fsdp"), "gemma2"),
    "tp2 to whole ones": Case(tensor(0, 2), layout(2, 2), "llama", "bfloat16"),
    "tp2 to its own workers": Case(tensor(0, 2), layout(0, 2), "qwen3"),
    "tp4 to tp2": Case(tensor(0, 4), tensor(2, 2), "gemma2"),
    "dp2 x tp2 to 1": Case(tensor(0, 4, dp=2), layout(3, 1), "qwen3"),
    "fsdp2 x tp2 to fsdp3": Case(tensor(0, 4, dp=2, sharding="fsdp"), layout(1, 3, "fsdp"), "llama", "float16"),
    "1 to fsdp2 x tp2": Case(layout(2, 1), tensor(0, 4, dp=2, sharding="fsdp"), "qwen3"),
    "cp2 to 2 others": Case(context(0, 2), layout(2, 2), "llama", "bfloat16"),
    "fsdp2 x cp2 to tp2": Case(context(0, 4, dp=2, sharding="fsdp"), tensor(1, 2), "qwen3"),
    "tp2 to fsdp cp3": Case(tensor(2, 2), context(0, 3, sharding="fsdp"), "gemma2"),
    "pp2 to whole ones": Case(staged(0, 2), layout(2, 2), "llama", "bfloat16"),
    "pp2 to its own workers": Case(staged(0, 2), layout(0, 2), "qwen3"),
    "1 to dp2 x pp2": Case(layout(1, 1), staged(0, 4), "gemma2", "float16"),
    "tp2 x pp2 to pp4": Case(Layout(DeviceMesh(0, 4), tp=2, pp=2), staged(0, 4, 4), "deep"),
    "pp2 to other stages": Case(staged(0, 2, stages=((3,), (1,))), staged(1, 2, stages=((1, 1), (1, 1))), "deep"),
    "fsdp2 x pp2 to tp2": Case(staged(0, 4, sharding="fsdp"), tensor(1, 2), "deep", "bfloat16"),
    "ep2 to whole ones": Case(experts(0, 2, 2), layout(2, 2), "qwen3_moe", "bfloat16"),
    "ep4 x tp2 to tp2": Case(experts(0, 4, 4, tp=2), tensor(1, 2), "mixtral"),
    "fsdp4 of ep2 to ep4": Case(experts(0, 4, 2, sharding="fsdp"), experts(0, 4, 4), "qwen3_moe"),
    "offloaded": Case(layout(0, 2, "fsdp"), layout(1, 2), "qwen3", "bfloat16", offloaded=True),
}


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(4, [one for case in CASES.values() for one in case[:2]])
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    kinds = {case.model for case in CASES.values()} - {"deep"}
    folders = {kind: tiny.save(base / kind, kind) for kind in kinds}
    return {**folders, "deep": tiny.save(base / "deep", "qwen3", num_hidden_layers=4)}


class Seen(NamedTuple):
    """One worker's weights before and after, and what it sent and lacked of them."""

    expected: dict[str, Any] | None  # of a worker of the source, whole
    taken: dict[str, Any] | None  # of a worker of the target, whole, by messages
    read: dict[str, Any] | None  # out of shared memory
    n_sent: int  # bytes
    n_read: int  # bytes, by shared memory
    n_sent_beside: int  # bytes of weights, where shared memory was there
    n_lacking: int  # bytes
    largest: int  # bytes of memory, beside its own, that was sent from or received into at a time
    landed: int  # bytes that came right to where they were wanted


def opened(
    folder: Path, role: ModelRole, one: Layout, rank: int, *, trained: bool, shared: bool = False
) -> TorchTrainEngine | None:
    if rank not in one.mesh.devices:
        return None
    (groups,) = joined
    optimizer = OPTIMIZER if trained else None
    settings = TrainSettings(max_tokens_per_microbatch=40, optimizer=optimizer, total_steps=4, shared=shared)
    return open_engine(role, str(folder), one, groups.of_layout(one), settings)


def whole_of(engine: TorchTrainEngine | None) -> dict[str, Any] | None:
    """Numpy, in which tensors travel; float64 holds each dtype's values exactly."""
    return {name: tensor.double().numpy() for name, tensor in engine.weights()} if engine is not None else None


def parts_of(engine: TorchTrainEngine | None) -> dict[str, WeightPart]:
    if engine is None:
        return {}
    with engine.local_parts() as parts:
        return dict(parts)


def move(ranks: LayoutRanks, folder: Path, case: Case) -> Seen:
    """Train one step in the source, whose last pass leaves weights gathered, and reallocate to the target."""
    rank, (groups,) = ranks.mesh.rank, joined
    role = ModelRole(trainable=True, dtype=case.dtype)
    source = opened(folder, role, case.source, rank, trained=True, shared=not case.offloaded)
    target = opened(folder, ModelRole(dtype=case.dtype), case.target, rank, trained=False)
    batch = tiny.batch(tiny.lengths(4, 20, 3), 3)
    if source is not None:
        source.train(call(), [batch.select([0, 1] if source.ranks.dp.rank == 0 else [2, 3])])
        source.inference(batch, "logprobs", 1.0)
    expected = whole_of(source)
    held, lacked = parts_of(source), 0
    for name, want in parts_of(target).items():
        common = held[name].box.intersect(want.box) if name in held else None
        lacked += want.box.numel - (common.numel if common is not None else 0)
    sizes, storages, landed, isend = [], [0], 0, dist.isend
    inside = {part.values.untyped_storage().data_ptr() for part in [*held.values(), *parts_of(target).values()]}
    wanted = {part.values.untyped_storage().data_ptr() for part in parts_of(target).values()}

    def noted(values: torch.Tensor) -> None:
        storage = values.untyped_storage()
        storages.append(0 if storage.data_ptr() in inside else storage.nbytes())

    def counted(flat: torch.Tensor, to: int) -> Any:
        sizes.append(flat.nbytes)
        noted(flat)
        return isend(flat, to)

    def watched(parts: Iterator[WeightPart]) -> Iterator[WeightPart]:
        nonlocal landed
        for part in parts:
            noted(part.values)
            landed += part.values.nbytes if part.values.untyped_storage().data_ptr() in wanted else 0
            yield part

    taken, read, n_read, n_beside = None, None, 0, 0
    receiver, dtype = source or target, getattr(torch, case.dtype)
    if receiver is not None:
        owner: TrainEngine | None = OffloadedEngine(source) if source is not None and case.offloaded else source
        with (
            pytest.MonkeyPatch.context() as patch,
            owner.local_parts() if owner is not None else nullcontext({}) as own,
        ):
            patch.setitem(exchanges.BUCKET_BYTES, "cpu", BUCKET)
            patch.setattr(dist, "isend", counted)
            shapes = {spec.name: spec.shape for spec in receiver.weight_specs()}
            model = spec_from_config(receiver.model.config.to_dict(), Where()), receiver.model.head
            moves = reallocation(shapes, dtype, (case.source, case.target), groups.member, model)
            place = WorkerParts(rank, CPU, own, moves.wants.get(rank, {}))
            sums = Checksums(moves, place, shapes, shares(layout_boxes(shapes, case.source, model), shapes))
            parts = exchange(moves, place).through(watched).through(sums.watch)
            if target is not None:
                target.load_weights(parts, 7)
                assert target.version == 7
            else:
                assert list(parts) == []
            patch.undo()
            wait_for(sums.compare())
            taken = whole_of(target)
            segment = source.segment if source is not None and not case.offloaded else None
            n_read, n_beside = read_again(moves, place._replace(segment=segment), target)
            read = whole_of(target)
    return Seen(expected, taken, read, sum(sizes), n_read, n_beside, lacked * dtype.itemsize, max(storages), landed)


def read_again(moves: Reallocation, place: WorkerParts, target: TorchTrainEngine | None) -> tuple[int, int]:
    """Reallocate by shared memory, twice, into a target that has been spoilt; each time, bytes that came from outside
    what this worker holds, and bytes of weights that it sent."""
    route, n_read, n_sent, isend = MappedRoute(moves, place.worker, ""), list[int](), list[int](), dist.isend
    own = {part.values.untyped_storage().data_ptr() for part in place.holds.values()}

    def watched(parts: Iterator[WeightPart]) -> Iterator[WeightPart]:
        for part in parts:
            others = part.values.untyped_storage().data_ptr() not in own
            n_read[-1] += part.values.nbytes if others else 0
            yield part

    def counted(flat: torch.Tensor, to: int) -> Any:
        n_sent[-1] += flat.nbytes if flat.is_floating_point() else 0
        return isend(flat, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        for version in range(2):
            n_read.append(0)
            n_sent.append(0)
            if target is None:
                assert list(watched(route.bring(place))) == []
                route.settle()
                continue
            for part in target.contents.weights.values():
                part.values.fill_(math.nan)
            target.load_weights(watched(route.bring(place)), version)
            route.settle()
    assert n_read == [n_read[0]] * 2
    assert n_sent == [n_sent[0]] * 2
    return n_read[0], n_sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_reallocation_is_a_copy_with_the_least_bytes(
    four: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    case = CASES[name]
    found: list[Seen] = four.run(move, folders[case.model], case)
    expected = found[case.source.mesh.first].expected
    assert expected is not None
    for worker, seen in enumerate(found):
        assert (seen.taken is not None) == (worker in case.target.mesh.devices)
        assert seen.largest <= BUCKET
        assert seen.landed <= seen.n_lacking
        if seen.taken is not None:
            assert seen.read is not None
            assert seen.taken.keys() == seen.read.keys() == expected.keys()
            assert all((seen.taken[weight] == expected[weight]).all() for weight in expected)
            assert all((seen.read[weight] == expected[weight]).all() for weight in expected)
        masters = case.source.sharding == "fsdp" and case.dtype != "float32"  # whose own parts are cast, too
        assert masters or seen.n_read == seen.n_lacking
        assert seen.n_sent_beside == (seen.n_sent if case.offloaded else 0)
    assert sum(seen.n_sent for seen in found) == sum(seen.n_lacking for seen in found)
    assert any(seen.landed for seen in found) or not any(seen.n_lacking for seen in found)
    sent = [found[worker].n_sent for worker in case.source.mesh.devices]
    if set(case.source.mesh.devices).isdisjoint(case.target.mesh.devices):  # each holds as much of what is sent
        assert min(sent) > 0.8 * max(sent)


SHAPES = {"a": (8, 3), "b": (5,), "c": (40, 2)}
FULL = {name: torch.arange(math.prod(shape), dtype=torch.float64).view(shape) for name, shape in SHAPES.items()}


def held_rows(n_ranks: int, rank: int) -> dict[str, WeightPart]:
    """The parts of FULL that a rank of a sharded copy holds."""
    found = {name: rows(shape, n_ranks, rank) for name, shape in SHAPES.items()}
    return {name: WeightPart(name, box, FULL[name][box.slices]) for name, box in found.items() if box is not None}


def flipped(ranks: LayoutRanks, wrong: int) -> str:
    """The error of a worker whose parts come from a sharded copy, of which worker `wrong` sends one element changed."""
    rank, (groups,) = ranks.mesh.rank, joined
    between = layout(0, 2, "fsdp"), layout(2, 1)
    moves = reallocation(SHAPES, torch.float64, between, groups.member)
    holds = held_rows(2, rank) if rank in (0, 1) else {}
    place = WorkerParts(rank, CPU, holds, moves.wants.get(rank, {}))
    sums = Checksums(moves, place, SHAPES, shares(layout_boxes(SHAPES, between[0], None), SHAPES))
    with pytest.MonkeyPatch.context() as patch:
        pack = exchanges._Flight._pack

        def changed(flight: Any, message: Any, flat: torch.Tensor) -> None:
            pack(flight, message, flat)
            flat[0] += 1

        if rank == wrong:
            patch.setattr(exchanges._Flight, "_pack", changed)
        for _ in sums.watch(exchange(moves, place)):
            pass
    try:
        wait_for(sums.compare())
    except WeightsDiffer as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", [-1, 0, 1])
def test_checksums_find_an_element_that_came_wrong(four: RankProcesses, wrong: int) -> None:
    found = four.run(flipped, wrong)
    assert [bool(text) for text in found] == [False, False, wrong >= 0, False]
    assert wrong < 0 or "worker 2 does not have 'a' as it was sent" in found[2]


def over_hosts(ranks: LayoutRanks) -> tuple[int, bool]:
    """Worker 0 on a host, 1 to 3 on another; the elements that this one sends, and if all came."""
    whole = {name: part.box for name, part in held_rows(1, 0).items()}
    wants = dict.fromkeys(range(1, 4), whole)
    moves = Reallocation(rounds({0: whole}, wants, [0, 1, 1, 1], 8, 256), wants, torch.float64, 256)
    place = WorkerParts(
        ranks.mesh.rank, CPU, held_rows(1, 0) if ranks.mesh.rank == 0 else {}, moves.wants.get(ranks.mesh.rank, {})
    )
    taken = {name: torch.full_like(tensor, math.nan) for name, tensor in FULL.items()}
    parts = exchange(moves, place)
    parts.land_in({name: WeightPart(name, whole[name], tensor) for name, tensor in taken.items()})
    for name, box, values in parts:
        if taken[name][box.slices].data_ptr() != values.data_ptr():
            taken[name][box.slices] = values
    sent = sum(m.numel * len(m.receivers) for messages in moves.rounds for m in messages if m.sender == ranks.mesh.rank)
    return sent, ranks.mesh.rank == 0 or all(torch.equal(taken[name], tensor) for name, tensor in FULL.items())


def test_what_comes_to_a_host_is_handed_on_inside_it(four: RankProcesses) -> None:
    found = four.run(over_hosts)
    n_elements = sum(tensor.numel() for tensor in FULL.values())
    assert all(right for _, right in found)
    assert found[0][0] == n_elements
    assert sum(sent for sent, _ in found[1:]) == 2 * n_elements


def without_worker_1(ranks: LayoutRanks, how: str) -> tuple[str, str, float]:
    """The kind and text of this worker's failure, and seconds until it: worker 1 leaves its groups, or does nothing."""
    (groups,) = joined
    if ranks.mesh.rank == 1:
        if how == "gone":
            groups.close()
        return "", "", 0.0
    moves = reallocation(SHAPES, torch.float64, (layout(0, 2, "fsdp"), layout(2, 1)), groups.member)
    began = time.monotonic()
    try:
        list(exchange(moves, WorkerParts(ranks.mesh.rank, CPU, held_rows(2, 0) if ranks.mesh.rank == 0 else {}, {})))
    except CollectiveError as error:
        failed = failure(ranks.mesh.rank, "rollout", error)
        return failed.kind, failed.error, time.monotonic() - began
    return "", "", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "late"])
def test_a_worker_that_is_missing_is_named_within_the_deadline(how: str) -> None:
    processes = RankProcesses(3, seconds=5.0)
    try:
        sender, _, (kind, text, seconds) = processes.run(without_worker_1, how)
    finally:
        processes.close()
    assert sender == ("", "", 0.0)  # what it holds has been taken
    assert kind == "worker"
    assert text.startswith("weights to or from worker 1 did not arrive: ")
    assert seconds < 10.0
    assert how == "gone" or seconds > 4.0
