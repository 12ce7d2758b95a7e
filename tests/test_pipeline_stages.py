"""Pipeline stages on real processes: what each holds, what a broken sample or a lost stage does to all of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.axes import coordinates_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.stages import layer_ranges, stages_of
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.logprob_gap import LogprobGap
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.cuts import Box, Shard, cut
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.executor import StageExecutor, StagePasses
from realgraph.runtime.parallel.pipeline.schedules import Action, Pipe
from realgraph.runtime.parallel.pipeline.stage import layer_stages
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.errors import NumericsError
from tests import tiny
from tests.engines import CPU, OPTIMIZER, call
from tests.ranks import RankProcesses, joined

UNEVEN = Layout(DeviceMesh(0, 2), pp=2, stages=((3,), (1,)))
TWICE = Layout(DeviceMesh(0, 2), pp=2, stages=((1, 1), (1, 1)))
FOUR = Layout(DeviceMesh(0, 4), pp=4)
TP = Layout(DeviceMesh(0, 4), tp=2, pp=2)
FSDP = Layout(DeviceMesh(0, 4), dp=2, pp=2, sharding="fsdp")
SHORT = 5.0  # seconds that a stage waits for another


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(4, (UNEVEN, TWICE, FOUR, TP, FSDP))
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: tiny.save(base / kind, kind, num_hidden_layers=4) for kind in ("qwen3", "llama")}


def ranks_of(layout: Layout, ranks: LayoutRanks) -> LayoutRanks | None:
    return joined[0].of_layout(layout) if ranks.mesh.rank in layout.mesh.devices else None


def opened(folder: Path, layout: Layout, ranks: LayoutRanks, gap: float | None = None) -> TorchTrainEngine:
    settings = TrainSettings(
        max_tokens_per_microbatch=40, optimizer=OPTIMIZER, total_steps=4, max_logprob_gap=gap, skip_idle=False
    )
    return open_engine(ModelRole(trainable=True), str(folder), layout, ranks, settings)


def holdings(ranks: LayoutRanks, folder: Path, layout: Layout) -> dict[str, Box] | None:
    here = ranks_of(layout, ranks)
    if here is None:
        return None
    with opened(folder, layout, here).local_parts() as parts:
        return {name: part.box for name, part in parts.items()}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("layout", [UNEVEN, TWICE, FOUR, TP], ids=["uneven", "twice", "pp4", "tp2 pp2"])
def test_a_stage_holds_what_the_cuts_give_it(
    four: RankProcesses, folders: dict[str, Path], kind: str, layout: Layout
) -> None:
    whole = build(ModelRole(), str(folders[kind]), Start(CPU))
    model = spec_from_config(whole.config.to_dict(), Where())
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.network.named_parameters()}
    stages = layer_ranges(stages_of(model, "lm", layout))
    found = four.run(holdings, folders[kind], layout)
    for device in layout.mesh.devices:
        at = coordinates_of(layout, device)
        layers = tuple(number for chunk in stages[at.pp] for number in chunk)
        shard = Shard(layers, at.pp == 0, at.pp == layout.pp - 1, tp_rank=at.tp, tp=layout.tp)
        boxes = {name: cut(model, "lm", name, shape, shard) for name, shape in shapes.items()}
        assert found[device] == {name: box for name, box in boxes.items() if box is not None}


def refuse(ranks: LayoutRanks, folder: Path, layout: Layout, what: str) -> tuple[str, list[int], bool] | None:
    """The error that a bad sample of the first data-parallel rank raises, and if the weights stayed as they were."""
    here = ranks_of(layout, ranks)
    if here is None:
        return None
    one = opened(folder, layout, here, gap=0.5 if what == "gap" else None)
    before = [tensor.clone() for _, tensor in one.weights()]
    batch = tiny.batch(tiny.lengths(8, 24, 1), 1)
    key = "advantages" if what == "nan" else "behaviour_logprobs"
    poisoned = batch.token_keys[key].clone()
    poisoned[batch.lengths[0] : sum(batch.lengths[:2])] = float("nan") if what == "nan" else -50.0
    bad = replace(batch, token_keys={**batch.token_keys, key: poisoned})
    share = bad if here.dp.size == 1 else bad.select([0, 1, 2, 3] if here.dp.rank == 0 else [4, 5, 6, 7])
    try:
        one.train(call(), [share])
    except (NumericsError, LogprobGap) as error:
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, one.weights(), strict=True))
        return str(error), list(getattr(error, "samples", ())), same
    raise AssertionError("nothing was raised")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWICE, FOUR, TP, FSDP], ids=["twice", "pp4", "tp2 pp2", "fsdp2 pp2"])
@pytest.mark.parametrize("what", ["nan", "gap"])
def test_all_stages_refuse_together(four: RankProcesses, folders: dict[str, Path], layout: Layout, what: str) -> None:
    found = [seen for seen in four.run(refuse, folders["qwen3"], layout, what) if seen is not None]
    assert len(found) == layout.mesh.n_devices
    assert all(same for _, _, same in found)
    text, samples, _ = found[0]
    assert found[1:] == found[:1] * (layout.mesh.n_devices - 1)
    if what == "gap":
        assert "nats away" in text
    else:
        assert "loss is nan" in text
        assert 1 in samples


def leave(ranks: LayoutRanks, layout: Layout) -> str:
    """Stage 1 stays away from the passes; what the others are told."""
    here = ranks_of(layout, ranks)
    if here is None:
        return ""
    pipeline = StageExecutor(Pipe(layout.pp), here.pp)
    if here.pp.rank == 1:
        return ""

    def forward(_: Action, arrived: Tensor | None) -> Tensor:
        return torch.ones(3, 2, requires_grad=True) * (1.0 if arrived is None else arrived)

    def backward(_: Action, made: Tensor, grad: Tensor | None) -> None:
        made.backward(torch.ones_like(made) if grad is None else grad)

    try:
        pipeline.train(4, StagePasses(lambda _: torch.empty(3, 2), forward, backward))
    except CollectiveError as error:
        return str(error)
    raise AssertionError("the missing stage was not noticed")


@pytest.mark.slow
def test_a_stage_that_stays_away_is_named_within_the_deadline() -> None:
    processes = RankProcesses(2, (TWICE,), seconds=SHORT)
    try:
        first, _ = processes.run(leave, TWICE)
    finally:
        processes.close()
    assert "hidden states of micro-batch 0 to pipeline stage 1 of workers 0 and 1 did not arrive" in first


def test_stages_that_a_model_can_not_lie_on_are_refused(folders: dict[str, Path]) -> None:
    model = build(ModelRole(), str(folders["llama"]), Start(CPU))
    with pytest.raises(ConfigError, match="the stages have 5 layers, the model 4"):
        layer_stages(model.config, model.head, Layout(DeviceMesh(0, 2), pp=2, stages=((3,), (2,))))
    with pytest.raises(ConfigError, match="a stage without layers"):
        layer_stages(model.config, model.head, Layout(DeviceMesh(0, 2), pp=2, stages=((4,), (0,))))
