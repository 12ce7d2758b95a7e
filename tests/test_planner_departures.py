"""Pins and constraints that a given plan does not keep to are named; a plan that was searched for keeps to all."""

import json
from pathlib import Path

import msgspec
import pytest

from realgraph.plan.command import plan_command
from realgraph.plan.options import PlanOptions
from realgraph.planner.feasibility.departures import departures
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.planner.search.search import search
from tests.test_planner_constraints import PPO, QUICK

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def plan() -> Plan:
    """With generation on the first node, tp 4, and the critic's training on the second."""
    pins = {"generate": Pin(first=0, devices=8, tp=4), "critic_train": Pin(first=8, devices=8)}
    asked = replace(PPO, pins=pins)
    found = search(asked, QUICK)
    assert departures(found, asked) == ()
    return found


PINS: dict[str, tuple[Pin, str]] = {
    "another axis": (Pin(tp=2), "tp: has tp 4 for 'generate'"),
    "another place": (Pin(first=8, devices=8), "first: has 'generate' on devices 0 to 7"),
    "another first device": (Pin(first=4), "first: has 'generate' on devices 0 to 7"),
    "another size": (Pin(devices=16), "devices: has 'generate' on devices 0 to 7"),
    "another cache": (Pin(kv_cache_tokens=4000), "kv_cache_tokens: has kv_cache_tokens "),
    "weights that wait": (Pin(residency="offloaded"), "residency: has residency resident for 'generate'"),
    "all of it": (Pin(first=0, devices=8, tp=4, dp=2, pp=1, sharding="replicated", residency="resident"), ""),
    "a size alone": (Pin(devices=8), ""),
}
CONSTRAINTS: dict[str, tuple[Constraints, str]] = {
    "a layout": (Constraints(forbid={"generate": (Pin(pp=2), Pin(tp=4))}), "forbid.generate[1]: has 'generate' so"),
    "a place": (Constraints(forbid={"generate": (Pin(first=0, devices=8),)}), "forbid.generate[0]: has 'generate' so"),
    "other places": (Constraints(forbid={"generate": (Pin(first=8), Pin(first=0, devices=4), Pin(tp=4, dp=8))}), ""),
    "one mesh": (
        Constraints(share=(("generate", "critic_train"),)),
        "share[0]: has 'generate' on devices 0 to 7, 'critic_train' on devices 8 to 15",
    ),
    "devices left free": (Constraints(reserve=1), "reserve: has 'critic_train' on devices 8 to 15"),
    "all devices": (Constraints(colocated=True), "colocated: has 'generate' on devices 0 to 7"),
}


@pytest.mark.parametrize("case", PINS)
def test_a_pin_that_the_plan_departs_from_is_named(plan: Plan, case: str) -> None:
    pin, said = PINS[case]
    found = departures(plan, replace(PPO, pins={"generate": pin}))
    assert len(found) == bool(said)
    for problem in found:
        path, _, text = said.partition(": ")
        assert problem.where.path == f"$.allocation.generate.{path}"
        assert problem.text.startswith(f"the given plan counts, and {text}")


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_a_constraint_that_the_plan_departs_from_is_named(plan: Plan, case: str) -> None:
    constraints, said = CONSTRAINTS[case]
    found = [
        f"{problem.where.path}: {problem.text}" for problem in departures(plan, replace(PPO, constraints=constraints))
    ]
    path, _, text = said.partition(": ")
    assert bool(found) == bool(said)
    assert not said or any(one.startswith(f"$.constraints.{path}: the given plan counts, and {text}") for one in found)


def test_offloaded_weights_depart_from_a_run_without(plan: Plan) -> None:
    away = replace(plan.allocations["ref"], residency="offloaded")
    edited = replace(plan, allocations={**plan.allocations, "ref": away})
    found = departures(edited, replace(PPO, constraints=Constraints(offload=False)))
    assert {problem.where.path for problem in found} == {"$.constraints.offload"}
    assert any("has the weights of 'ref' wait in host memory" in problem.text for problem in found)


def test_the_command_warns_of_it_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "how much", "answer": "4"}] * 100
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    lines = [
        "graph: grpo",
        "models: {actor: {path: Qwen/Qwen3-1.7B, dtype: bfloat16}}",
        "data: {path: rows.jsonl}",
        "cluster: {devices: 8, kind: H100-SXM}",
        "allocation:",
        "  train: {devices: 4}",
    ]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    plan_command(tmp_path / "run.yaml", (), PlanOptions(brief=True, out=tmp_path / "plan.json"))
    assert "the given plan counts" not in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("\n".join(lines).replace("devices: 4", "devices: 2"))
    plan_command(tmp_path / "run.yaml", (), PlanOptions(brief=True, edited=tmp_path / "plan.json"))
    said = "run.yaml:6: $.allocation.train.devices: the given plan counts, and has 'train' on devices 0 to 3"
    assert said in capsys.readouterr().err
