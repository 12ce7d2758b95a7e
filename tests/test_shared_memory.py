"""Collectives through shared memory give what gloo gives, in any order of sizes and kinds, and end when a rank ends."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.collectives.shared_memory import LOOK_SECONDS, SLOT_BYTES, open_shared_memory
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from realgraph.runtime.train.recompute import selective
from tests.ranks import RankProcesses

DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")
KINDS = ("add", "largest", "gather", "scatter", "broadcast", "collect", "exchange")
SIZES = (1, 7, 4096, 3 * 4096 + 1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 5)
Op = tuple[str, str, int]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    processes = RankProcesses(request.param)
    yield processes
    processes.close()


def values(op: Op, number: int, rank: int, n: int) -> torch.Tensor:
    """Small whole numbers, which any order of a sum adds alike."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 9, (n,), generator=generator).to(getattr(torch, op[1]))


def counts(number: int, size: int, largest: int) -> list[list[int]]:
    """Rows from each rank to each: uneven, with zeros."""
    return [[(number + 3 * a + 5 * b) % 4 * (largest // 4) for b in range(size)] for a in range(size)]


def one(ranks: Ranks, op: Op, number: int) -> torch.Tensor:
    kind, _, n = op
    match kind:
        case "add" | "largest":
            return getattr(ranks, kind)(values(op, number, ranks.rank, n))
        case "gather":
            return ranks.gather_rows(values(op, number, ranks.rank, n))
        case "scatter":
            return ranks.scatter_rows(values(op, number, ranks.rank, n * ranks.size))
        case "broadcast":
            return ranks.broadcast(values(op, number, ranks.rank, n), number % ranks.size)
        case "collect":
            begun = ranks.begin_collect(values(op, number, ranks.rank, min(n, 4096)))
            if number % 2:  # another collective begins before the first has been waited for
                ranks.barrier()
            return begun()
        case _:
            rows = counts(number, ranks.size, n)
            out, into = rows[ranks.rank], [row[ranks.rank] for row in rows]
            return ranks.exchange_rows(values(op, number, ranks.rank, sum(out)), out, into)


def both(layout: LayoutRanks, ops: list[Op]) -> bool:
    """True where shared memory and gloo agree in every collective."""
    shared = layout.mesh
    assert shared.memory is not None
    gloo = Ranks(shared.device, shared.group, shared.name)
    ours = [one(shared, op, number) for number, op in enumerate(ops)]
    theirs = [one(gloo, op, number) for number, op in enumerate(ops)]
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from(SIZES)), max_size=8))
def test_shared_memory_gives_what_gloo_gives(ranks: RankProcesses, ops: list[Op]) -> None:
    assert all(ranks.run(both, ops))


def test_a_system_without_process_descriptors_goes_on_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(pid)

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert open_shared_memory(HashStore(), (0, 1), 0, timedelta(seconds=1), "none") is None


def in_and_out_of_inference(layout: LayoutRanks) -> list[float]:
    """Sums and collections in either mode, of tensors made in either."""
    ranks, made = layout.mesh, []
    with torch.inference_mode():
        made += [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float16)]
        ranks.add(made[0])
        ranks.collect(made[1])
    leaf = torch.ones(2, dtype=torch.float16, requires_grad=True)
    sums = [ranks.add(tensor) for tensor in (made[1], torch.ones(2, dtype=torch.float16))]
    gathered = ranks.collect(torch.ones(2, dtype=torch.float16)).sum(0)
    (leaf * sums[1] * gathered).sum().backward()  # what came back may be kept for a backward pass
    assert leaf.grad is not None
    return [float(tensor[0]) for tensor in (*made, sums[1], gathered, leaf.grad)]


def test_tensors_of_inference_and_of_training_pass_alike(ranks: RankProcesses) -> None:
    for found in ranks.run(in_and_out_of_inference):
        n = found[0]
        assert found == [n, n, n, n, n * n]
        assert n > 1


def recomputed_late(layout: LayoutRanks) -> list[float]:
    """The gradient of a layer that is recomputed selectively, where others come so late to the sum of its repetition
    that their peers look at them meanwhile."""
    passes = 0

    def layer(states: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 2 and layout.mesh.rank:
            time.sleep(2.5 * LOOK_SECONDS)
        return torch.relu(layout.mesh.add((states @ torch.ones(2, 2)).detach()) * states).square()

    states = torch.ones(2, 2, requires_grad=True)
    out = checkpoint(layer, states, use_reentrant=False, context_fn=selective(1))
    out.sum().backward()
    assert passes == 2 and states.grad is not None
    return [float(one) for one in states.grad.flatten()]


def test_a_rank_may_come_late_to_a_sum_that_is_computed_again(ranks: RankProcesses) -> None:
    results = ranks.run(recomputed_late)
    n = 2.0 * len(results)
    assert results == [[2 * n * n] * 4] * len(results)


def sums(layout: LayoutRanks, n: int) -> tuple[bool, bytes]:
    own = torch.randn(n, generator=torch.Generator().manual_seed(layout.mesh.rank))
    ours = layout.mesh.add(own.clone())
    gathered = layout.mesh.gather_rows(own).view(layout.mesh.size, -1)
    return torch.allclose(ours, gathered.double().sum(0).float(), atol=1e-5), ours.numpy().tobytes()


@pytest.mark.parametrize("n", [100, SLOT_BYTES // 4 + 100])
def test_all_ranks_get_the_same_bits_of_a_sum(ranks: RankProcesses, n: int) -> None:
    results = ranks.run(sums, n)
    assert all(well for well, _ in results)
    assert len({bits for _, bits in results}) == 1


def wait_for_one_that(layout: LayoutRanks, leaves: str, errors: Path) -> None:
    """Rank 2 leaves in its way; the others write down their error."""
    if layout.mesh.rank == 2:
        if leaves == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif leaves == "closes":
            assert layout.mesh.memory is not None
            layout.mesh.memory.close()
        return
    with pytest.raises(CollectiveError) as caught:
        layout.mesh.add(torch.ones(3))
    (errors / str(layout.mesh.rank)).write_text(str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "seconds", "text"),
    [
        ("closes", 60.0, "worker 2 has ended"),
        ("is killed", 60.0, "worker 2 has ended"),
        ("stays away", 1.0, "worker 2 did not come within 1 s"),
    ],
)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, leaves: str, seconds: float, text: str) -> None:
    three = RankProcesses(3, seconds=seconds)
    with contextlib.suppress(EOFError):  # of the rank that was killed
        three.run(wait_for_one_that, leaves, tmp_path)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"all-reduce over workers 0 to 2 failed: {text}"
    with contextlib.suppress(BrokenPipeError):
        three.close()
