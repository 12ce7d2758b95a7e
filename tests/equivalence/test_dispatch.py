"""A mixture of experts over several ranks: outputs and gradients of one process, whatever rows a rank has."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realgraph.runtime.parallel.cuts import split
from realgraph.runtime.parallel.experts.block import NAMES, Experts, MixtureSpec, SparseBlock
from realgraph.runtime.parallel.experts.dispatch import Dispatch
from realgraph.runtime.parallel.experts.routers import Router
from realgraph.runtime.parallel.experts.routing import RoutingRecord
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from tests.equivalence.layouts import LAYOUTS
from tests.ranks import RankProcesses, joined

EXPERTS, HIDDEN, WIDTH = 8, 6, 5
ROWS = [(5, 0, 3, 1), (0, 0, 0, 2), (7, 7, 7, 7), (0, 0, 0, 0)]


def owned(rank: int, ranks: int) -> range:
    first, n_own = split(EXPERTS, ranks, rank)
    return range(first, first + n_own)


def block_of(rank: int, ranks: int) -> SparseBlock:
    """The same weights on every rank, of which it keeps its own experts."""
    settings = MixtureSpec(EXPERTS, 2, HIDDEN, WIDTH)
    experts = Experts(NAMES["qwen3_moe"], settings, F.silu)
    router = "gate", Router((EXPERTS, HIDDEN), 2, normalised=True)
    block = SparseBlock(settings, router, experts, (RoutingRecord(1, EXPERTS), 0)).double()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in block.named_parameters():
        whole = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        here = not name.startswith("experts.") or int(name.split(".")[1]) in owned(rank, ranks)
        parameter.data = whole if here else whole[:0]
    return block


def rows_of(counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(sum(counts))
    return torch.split(torch.randn(sum(counts), HIDDEN, generator=draw, dtype=torch.float64), list(counts))


def passes(block: SparseBlock, rows: Tensor) -> tuple[Any, Any, dict[str, Any]]:
    x = rows.clone().requires_grad_()
    out = block(x[None])[0]
    torch.autograd.backward((out * torch.arange(1.0, 1 + HIDDEN)).square().sum())
    assert x.grad is not None
    grads = {name: p.grad.numpy() for name, p in block.named_parameters() if p.numel() and p.grad is not None}
    return out.detach().numpy(), x.grad.numpy(), grads


def assert_near(ours: Any, theirs: Any) -> None:
    """Equal but for rounding."""
    assert abs(ours - theirs).max(initial=0) <= 1e-13 * max(1.0, abs(theirs).max(initial=0))


def spread(everybody: LayoutRanks, layout: str, counts: tuple[int, ...]) -> tuple[Any, Any, dict[str, Any]]:
    """One rank's pass over its rows."""
    ranks = joined[0].of_layout(LAYOUTS[layout])
    block = block_of(ranks.ep.rank, ranks.ep.size)
    block.spread, block.experts.own = ranks.ep, owned(ranks.ep.rank, ranks.ep.size)
    return passes(block, rows_of(counts)[everybody.mesh.rank])


@pytest.mark.parametrize("counts", ROWS)
@pytest.mark.parametrize("layout", ["ep2 dp4", "ep4"])
def test_rows_find_their_experts_and_come_back(four: RankProcesses, layout: str, counts: tuple[int, ...]) -> None:
    found = four.run(spread, layout, counts)
    expected, grads = [], []
    for rows in rows_of(counts):
        out, d_x, of_weights = passes(block_of(0, 1), rows)
        expected.append((out, d_x))
        grads.append(of_weights)
    for (out, d_x, _), (their_out, their_d_x) in zip(found, expected, strict=True):
        assert_near(out, their_out)
        assert_near(d_x, their_d_x)
    for name in grads[0]:
        if name.startswith("experts."):  # those with rows of the whole group, and those without any
            holders = [rank for rank, (_, _, own) in enumerate(found) if name in own]
            assert len(holders) == 4 // LAYOUTS[layout].ep
            assert_near(sum(found[rank][2][name] for rank in holders), sum(one[name] for one in grads))


def received(everybody: LayoutRanks, counts: list[list[int]]) -> list[int]:
    return Dispatch(torch.tensor(counts[everybody.mesh.rank]), everybody.dp).received


def test_each_expert_gets_the_rows_of_all_senders(four: RankProcesses) -> None:
    counts = [[i * j % 5 for j in range(EXPERTS)] for i in range(4)]
    found = four.run(received, counts)
    assert [n for part in found for n in part] == [sum(column) for column in zip(*counts, strict=True)]


def test_one_rank_alone_exchanges_nothing() -> None:
    rows = torch.arange(6.0).view(3, 2)
    assert Ranks(torch.device("cpu")).exchange_rows(rows, [3], [3]) is rows
