"""Memory of a worker in a reallocation besides what it holds and wants: two buckets at most, all of it counted."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realgraph.graphs.errors import Where
from realgraph.planner.inputs.model_spec import Head, ModelSpec, spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.parallel import exchange as exchanges
from realgraph.runtime.parallel.cuts import Box, layout_boxes
from realgraph.runtime.parallel.exchange import WeightPart, WorkerParts, exchange, reallocation
from realgraph.runtime.parallel.groups import LayoutRanks
from tests import tiny
from tests.engines import CPU
from tests.ranks import RankProcesses, joined

N_WORKERS = 4
CUTS = [cut for cut in product((1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4)) if math.prod(cut) <= N_WORKERS]  # tp cp pp dp
CONFIG = tiny.config("qwen3")
MODEL: tuple[ModelSpec, Head] = spec_from_config(CONFIG.to_dict(), Where()), "lm"


class Move(NamedTuple):
    """A reallocation of weights that lie in float64. lands: its receivers say where they want them."""

    source: Layout
    target: Layout
    hosts: tuple[int, ...]
    dtype: Any
    bucket: int
    lands: bool


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to four workers, anywhere among them."""
    tp, cp, pp, dp = draw(st.sampled_from(CUTS))
    n = tp * cp * pp * dp
    mesh = DeviceMesh(draw(st.integers(0, N_WORKERS - n)), n)
    sharding: Literal["replicated", "fsdp"] = "fsdp" if dp * cp > 1 and draw(st.booleans()) else "replicated"
    return Layout(mesh, dp=dp, tp=tp, pp=pp, cp=cp, sharding=sharding)


@st.composite
def moves(draw: st.DrawFn) -> Move:
    hosts = draw(st.sampled_from([(0,) * N_WORKERS, (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 2)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    bucket = draw(st.sampled_from([256, 1024, 4096]))
    return Move(draw(layouts()), draw(layouts()), hosts, dtype, bucket, draw(st.booleans()))


class Allocations(TorchDispatchMode):
    """The bytes of all storages that operations have made since it began, and the most that there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if _is_there(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if _is_there(one) and one.untyped_storage().data_ptr() not in given:
                self._made.append(StorageWeakRef(one.untyped_storage()))
        self.most = max(self.most, self._bytes())
        return result

    def _bytes(self) -> int:
        self._made = [one for one in self._made if not one.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._made]
        return sum({one.data_ptr(): one.nbytes() for one in storages if one is not None}.values())


def _is_there(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def numbered(boxes: Mapping[str, Box], shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> dict[str, torch.Tensor]:
    """The boxes of tensors in which every element has its number in the whole one."""
    wholes = {name: torch.arange(math.prod(shape), dtype=dtype).view(shape) for name, shape in shapes.items()}
    return {name: wholes[name][box.slices].clone() for name, box in boxes.items()}


def staged(ranks: LayoutRanks, move: Move, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, bool]:
    """The most bytes that this worker had besides its own, and if what it has in the end is right."""
    worker, (groups,) = ranks.mesh.rank, joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(exchanges.BUCKET_BYTES, "cpu", move.bucket)
        member = replace(groups.member, hosts=tuple(f"host{number}" for number in move.hosts))
        moves = reallocation(shapes, move.dtype, (move.source, move.target), member, MODEL)
    held = layout_boxes(shapes, move.source, MODEL).get(worker, {})
    holds = {name: WeightPart(name, held[name], own) for name, own in numbered(held, shapes, torch.float64).items()}
    wants = moves.wants.get(worker, {})
    into = {name: torch.full(box.shape, math.nan, dtype=move.dtype) for name, box in wants.items()}
    parts = exchange(moves, WorkerParts(worker, CPU, holds, wants))
    if move.lands:
        parts.land_in({name: WeightPart(name, wants[name], own) for name, own in into.items()})
    with torch.no_grad(), Allocations() as made:
        for name, box, values in parts:
            own = into[name][box.within(wants[name]).slices]
            if own.data_ptr() != values.data_ptr():
                own.copy_(values)
    expected = numbered(wants, shapes, move.dtype)
    return made.most, all(torch.equal(into[name], expected[name]) for name in wants)


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(N_WORKERS)
    yield processes
    processes.close()


SHAPES = {name: tuple(own.shape) for name, own in tiny.network("qwen3").named_parameters()}


@pytest.mark.slow
@given(move=moves())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_worker_has_two_buckets_at_most_besides_its_own(four: RankProcesses, move: Move) -> None:
    found = four.run(staged, move, SHAPES)
    assert all(right for _, right in found)
    assert max(peak for peak, _ in found) <= 2 * move.bucket
