"""Engine kinds state what they can run; planner, validation and workers ask nothing else: one switch is enough."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import ModelRole
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.options.constraints import lacking_transport
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request import engine_support
from realgraph.planner.request.engine_support import SGLANG_KIND, SUPPORT, TORCH, TORCH_KIND
from realgraph.run.running import prepare
from realgraph.runtime.engine import OwnWeights, RolloutLimits, SharedWeights, TrainSettings, WeightSource
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.models.building import DTYPES, Start, build
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.worker.engines import ENGINES, EngineKind
from realgraph.runtime.worker.roles import Roles
from tests import tiny
from tests.engines import CPU, OneRank, call, engine, folder, no_handover
from tests.run_texts import place

__all__ = ["folder", "place"]
SPLIT = "allocation={train: {devices: 2, tp: 2}, rollout: {devices: 2, tp: 2}}"
MACHINE = ("cluster.kind=H100-SXM", "cluster.devices=2")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """A kind of engines that runs tp: the layouts that it was opened with."""
    layouts: list[Layout] = []

    def open_train(role: ModelRole, path: str, layout: Layout, ranks: LayoutRanks, settings: TrainSettings) -> Any:
        layouts.append(layout)
        return open_engine(role, path, Layout(DeviceMesh(0, 1)), ranks, settings)

    monkeypatch.setitem(SUPPORT, TORCH_KIND, msgspec.structs.replace(TORCH, axes=("tp",), generate_axes=("tp",)))
    fake = EngineKind(open_train, ENGINES[TORCH_KIND].open_rollout)
    monkeypatch.setattr("realgraph.runtime.worker.roles.ENGINES", {TORCH_KIND: fake})
    return layouts


def test_tp_in_an_engines_support_is_all_that_planning_validation_and_workers_need(
    place: Path, opened: list[Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(place / "model")
    tiny.save(place / "model")
    run_file, overrides = place / "run.yaml", (*MACHINE, SPLIT)
    prepared = prepare(run_file, overrides, None)
    assert {prepared.job.plan.allocations[name].layout.tp for name in ("train", "rollout")} == {2}
    assert not validate(prepared.job.plan, prepared.request)
    Roles(prepared.job, no_handover(), OneRank(), lambda tokens: "", lambda call: None)
    assert [layout.tp for layout in opened if layout == prepared.job.plan.allocations["train"].layout] == [2]

    monkeypatch.setitem(
        SUPPORT, TORCH_KIND, msgspec.structs.replace(TORCH, axes=())
    )  # the same run file for engines without it
    with pytest.raises(ConfigError, match="the embedded engines run dp only"):
        prepare(run_file, overrides, None)
    refused = validate(
        prepared.job.plan, msgspec.structs.replace(prepared.request, engine=engine_support.run_support())
    )
    assert any("tensor parallelism" in problem.text for problem in refused)


def supporting(monkeypatch: pytest.MonkeyPatch, **abilities: object) -> None:
    """Give the embedded engines other abilities."""
    monkeypatch.setitem(SUPPORT, TORCH_KIND, msgspec.structs.replace(TORCH, **abilities))


def test_a_number_format_that_an_engine_lacks_is_refused_at_its_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(place / "model")
    tiny.save(place / "model")
    run_file = place / "run.yaml"
    run_file.write_text(run_file.read_text().replace("path: model}", "path: model, dtype: float16}"))
    prepared = prepare(run_file, (), None)
    assert not validate(prepared.job.plan, prepared.request)

    supporting(monkeypatch, dtypes=("float32", "bfloat16"))
    with pytest.raises(ConfigError) as refused:
        prepare(run_file, (), None)
    (problem,) = refused.value.problems
    line = run_file.read_text().splitlines().index("models: {actor: {path: model, dtype: float16}}") + 1
    assert (problem.where.file, problem.where.line, problem.where.path) == (
        str(run_file),
        line,
        "$.models.actor.dtype",
    )
    assert problem.text == "the embedded engines don't compute in float16"
    assert problem.hint == "set it to float32 or bfloat16"
    here = msgspec.structs.replace(prepared.request, engine=engine_support.run_support())
    edited = {problem.where.path: problem.hint for problem in validate(prepared.job.plan, here)}
    trained = {name for name in prepared.job.plan.allocations if prepared.request.graph.role(name) == "actor"}
    assert edited.keys() == {f"$.allocations.{name}" for name in trained}
    assert set(edited.values()) == {"set models.actor.dtype to float32 or bfloat16"}


def test_the_engines_compute_in_all_number_formats_that_they_say() -> None:
    assert DTYPES.keys() == set(TORCH.dtypes)


def test_weights_travel_by_the_transports_that_an_engine_has(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place / "model")
    tiny.save(place / "model")
    apart = "allocation={train: {devices: 1, first: 0}, rollout: {devices: 1, first: 1}}"
    run_file, overrides = place / "run.yaml", (*MACHINE, apart)
    linked = prepare(run_file, overrides, None)
    assert linked.job.plan.reallocation_transport["rollout"] == "device"

    supporting(monkeypatch, transports=("host",))
    through_host = prepare(run_file, overrides, None)
    assert through_host.job.plan.reallocation_transport["rollout"] == "host"
    assert not validate(through_host.job.plan, through_host.request)
    (problem,) = validate(linked.job.plan, through_host.request)
    assert (problem.where.path, problem.hint) == ("$.reallocation_transport.rollout", "set it to host")
    slower = (plan.reallocation_seconds["rollout"] for plan in (linked.job.plan, through_host.job.plan))
    assert next(slower) < next(slower)

    generates = linked.request.graph.calls["rollout"]
    assert not lacking_transport(
        msgspec.structs.replace(TORCH, offload=("train",)), generates, "host"
    )  # of offloaded states
    supporting(monkeypatch, transports=("device", "host"))
    assert prepare(run_file, overrides, None).job.plan.reallocation_transport["rollout"] == "device"


def test_every_kind_of_engine_says_what_it_supports() -> None:
    assert {*ENGINES, SGLANG_KIND} == SUPPORT.keys()  # servers only generate: `open_server`


def test_the_train_engine_refuses_dtypes_that_its_support_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realgraph.runtime.train.engine.TORCH", msgspec.structs.replace(TORCH, dtypes=("float32",)))
    assert engine(folder).role.dtype == "float32"
    with pytest.raises(ConfigError, match="does not compute in bfloat16"):
        engine(folder, {"dtype": "bfloat16"})


# --- weights that a rollout engine reads in place --------------------------------------------------------------------


def shared(one: TorchTrainEngine) -> tuple[SharedWeights, nn.Module]:
    weights = one.shared_weights()
    return weights, open_rollout(
        one.role, weights, RolloutLimits(), lambda tokens: "", lambda: None
    )._batch._model.module


def test_shared_weights_are_the_trained_tensors_and_change_with_them(folder: Path) -> None:
    one = engine(folder)
    weights, network = shared(one)
    own = dict(one.model.network.named_parameters())
    seen = dict(network.named_parameters())
    assert seen.keys() == own.keys() == weights.tensors.keys()
    assert all(seen[name].data_ptr() == own[name].data_ptr() for name in own)
    assert not any(parameter.requires_grad for parameter in seen.values())
    before = {name: parameter.detach().clone() for name, parameter in seen.items()}
    one.train(call(), [tiny.batch([9, 12, 7, 10])])
    assert any(not torch.equal(seen[name], before[name]) for name in before)
    assert all(torch.equal(seen[name], own[name]) for name in own)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_network_over_shared_tensors_computes_what_their_own_does(kind: str, tmp_path: Path) -> None:
    one = engine(tiny.save(tmp_path / kind, kind))
    _, network = shared(one)
    batch, plain = tiny.batch([17, 5]), build(ModelRole(), str(tmp_path / kind), Start(CPU))
    with torch.no_grad():
        found, expected = (model.run(batch, Wants()).logprobs for model in (PackedModel(network), plain))
    assert found is not None and expected is not None and torch.equal(found, expected)


def test_an_engine_of_its_own_weights_takes_a_saved_state_with_its_version(folder: Path, tmp_path: Path) -> None:
    one = engine(folder)
    one.train(call(), [tiny.batch([9, 12, 7, 10])])
    one.save(tmp_path / "saved")
    own: WeightSource = OwnWeights(str(folder), CPU)
    rollout = open_rollout(ModelRole(), own, RolloutLimits(), lambda tokens: "", lambda: None)
    assert rollout.version == 0
    rollout.load(tmp_path / "saved")
    assert rollout.version == one.version == 1
    trained = dict(one.weights())
    assert all(torch.equal(own, trained[name]) for name, own in rollout._batch._model.module.named_parameters())
