"""Engines whose weights lie in shared memory that other workers may read: they train as in memory of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import open_engine
from tests import tiny
from tests.engines import OPTIMIZER, call
from tests.ranks import RankProcesses, joined

LAYOUTS = (Layout(DeviceMesh(0, 3), dp=3), Layout(DeviceMesh(0, 3), dp=3, sharding="fsdp"))


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    processes = RankProcesses(3, LAYOUTS)
    yield processes
    processes.close()


def trained(ranks: LayoutRanks, folder: Path, layout: Layout, shared: bool) -> tuple[dict[str, Any], float, bool]:
    """Weights after two steps, the bytes of what lies here, and if all of it still lies in the segment."""
    (groups,) = joined
    settings = TrainSettings(max_tokens_per_microbatch=40, optimizer=OPTIMIZER, total_steps=4, shared=shared)
    role = ModelRole(trainable=True, dtype="float32")
    engine = open_engine(role, str(folder), layout, groups.of_layout(layout), settings)
    batch = tiny.batch(tiny.lengths(6, 20, 3), 3)
    for _ in range(2):
        engine.train(call(), [batch.select([2 * ranks.mesh.rank, 2 * ranks.mesh.rank + 1])])
        engine.inference(batch, "logprobs", 1.0)
    weights = {name: tensor.numpy().copy() for name, tensor in engine.weights()}
    segment, parts = engine.segment, engine.contents.weights.values()
    inside = segment is not None and all(segment.offset(p.values) is not None or not p.values.numel() for p in parts)
    return weights, sum(part.values.nbytes for part in parts), inside


@pytest.mark.parametrize("layout", LAYOUTS, ids=["replicated", "fsdp"])
def test_engines_train_in_shared_memory_as_in_their_own(three: RankProcesses, tmp_path: Path, layout: Layout) -> None:
    folder = tiny.save(tmp_path / "model", "qwen3")  # of sizes that three ranks can't share evenly
    ours, plain = three.run(trained, folder, layout, True), three.run(trained, folder, layout, False)
    for (shared, n_bytes, inside), (own, n_own, other) in zip(ours, plain, strict=True):
        assert (inside, other) == (True, False)
        assert n_bytes == n_own
        assert all((shared[name] == own[name]).all() for name in own)
