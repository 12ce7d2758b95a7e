"""Tables of measured costs: read with good errors, merged, and turned into factors of phases."""

import math
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.costs.calibrate.calibrate import merge, phase_factors
from realgraph.planner.costs.overhead import Operation, collective_seconds, link_share
from realgraph.planner.inputs.devices import device_kinds
from realgraph.planner.request.cost_table import (
    COSTS_FILE,
    COSTS_FORMAT,
    CostTable,
    MeasuredCall,
    PhaseFactor,
    costs_to_json,
    load_costs,
)
from realgraph.planner.request.request import call_hashes
from tests.planner_cases import cluster, ppo, request

CPU = device_kinds()["cpu"].costs
OPERATIONS: tuple[Operation, ...] = ("gather", "scatter", "exchange", "p2p")


def measured(call: str, seconds: float, predicted: float, **fields: object) -> MeasuredCall:
    """A train call on two devices."""
    base = MeasuredCall(
        call=call,
        phase="train",
        model="m",
        workload="w",
        devices=2,
        dp=2,
        tp=1,
        pp=1,
        ep=1,
        cp=1,
        sharding="replicated",
        max_tokens_per_microbatch=1024,
        seconds=seconds,
        predicted_seconds=predicted,
        error=0.02,
        count=5,
    )
    return replace(base, **fields)


TABLE = CostTable(
    kind="cpu",
    name="here",
    date="2026-01-01T00:00:00+00:00",
    factors=CPU,
    phases={"train": PhaseFactor(1.5, 0.0, 0.1, 3)},
    calls=(measured("train", 1.5, 1.0),),
    lengths=(1, 2, 3),
)


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_costs(path)
    (found,) = raised.value.problems
    return str(found)


def test_a_table_comes_back_from_its_file_and_from_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / COSTS_FILE).write_bytes(costs_to_json(TABLE))
    assert load_costs(tmp_path / COSTS_FILE) == TABLE
    assert load_costs(tmp_path) == TABLE


def test_what_is_no_table_is_named_with_a_way_out(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    assert "no file or run directory" in problem(file)
    assert "realgraph profile" in problem(file)
    assert "no run directory" in problem(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    assert "left no costs.json" in problem(tmp_path)
    file.write_bytes(b'{"format": 2, "name": "\xff"}')
    assert "no table of costs" in problem(file)
    file.write_text("[" * 100_000)
    assert "no table of costs" in problem(file)
    file.write_text("{")
    assert "no table of costs" in problem(file)
    file.write_text('{"format": 2, "kinds": "cpu"}')
    assert "kinds" in problem(file)
    for other in (1, 4, 7):
        file.write_text(f'{{"format": {other}}}')
        assert f"format {other}" in problem(file)
        assert "reads formats 2 to 3" in problem(file)
    file.write_text('{"kind": "cpu"}')
    assert "format" in problem(file)


def test_a_table_from_before_other_collectives_were_measured_has_them_as_its_all_reduce(tmp_path: Path) -> None:
    old = msgspec.to_builtins(replace(TABLE, factors=replace(CPU, link=0.3, collective_seconds=5e-5)))
    for name in OPERATIONS:
        del old["factors"][name], old["factors"][f"{name}_seconds"]
    (tmp_path / COSTS_FILE).write_bytes(msgspec.json.encode(old | {"format": 2}))
    read = load_costs(tmp_path)
    assert read.format == COSTS_FORMAT
    assert read.factors is not None
    for name in OPERATIONS:
        assert (link_share(read.factors, name), collective_seconds(cluster(), read.factors, name)) == (0.3, 5e-5)
    (tmp_path / COSTS_FILE).write_bytes(costs_to_json(read))
    assert load_costs(tmp_path) == read


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (replace(TABLE, factors=replace(CPU, gemm=0.0)), "`$.factors.gemm`"),
        (replace(TABLE, factors=replace(CPU, scatter=1e-9)), "`$.factors.scatter`"),
        (replace(TABLE, factors=replace(CPU, p2p_seconds=-1e-3)), "`$.factors.p2p_seconds`"),
        (replace(TABLE, factors=replace(CPU, layer_seconds=-1e-3)), "`$.factors.layer_seconds`"),
        (replace(TABLE, phases={"train": PhaseFactor(0.0)}), "`$.phases[...].factor`"),
        (replace(TABLE, calls=(measured("train", -1.0, 1.0),)), "`$.calls[0].seconds`"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(table: CostTable, says: str, tmp_path: Path) -> None:
    (tmp_path / COSTS_FILE).write_bytes(costs_to_json(table))
    assert says in problem(tmp_path)


def test_what_was_measured_speaks_of_calls_of_equal_precision_and_states_alone() -> None:
    asked = request(ppo())
    own = call_hashes(asked, "actor_train")
    roles = asked.graph.models
    for changed in ({"dtype": "float32"}, {"gradient_checkpointing": True}):
        role = replace(roles["actor"], **changed)
        other = replace(asked, graph=replace(asked.graph, models={**roles, "actor": role}))
        assert call_hashes(other, "actor_train") != own
        assert call_hashes(other, "critic_train") == call_hashes(asked, "critic_train")
    twice = replace(asked.graph.calls["actor_train"], epochs=2)
    assert call_hashes(replace(asked, graph=replace(asked.graph, calls={"actor_train": twice})), "actor_train") != own


@pytest.mark.parametrize("seed", range(20))
def test_a_phase_s_factor_is_found_and_its_error_covers_it(seed: int) -> None:
    rng = random.Random(seed)
    factor, noise = math.exp(rng.uniform(-1, 1)), rng.uniform(0, 0.2)
    calls = [
        measured(f"c{i}", factor * predicted * math.exp(rng.gauss(0, noise)), predicted)
        for i, predicted in enumerate(rng.uniform(0.1, 10) for _ in range(40))
    ]
    found = phase_factors(calls)["train"]
    assert found.count == 40
    assert abs(math.log(found.factor / factor)) < 3 * max(noise, 0.03) / math.sqrt(40) + 0.03 * abs(math.log(factor))
    assert found.error >= 0.7 * noise


def test_few_calls_say_less_than_many() -> None:
    one = phase_factors([measured("a", 2.0, 1.0)])["train"]
    many = phase_factors([measured(f"c{i}", 2.0, 1.0) for i in range(20)])["train"]
    assert 1.0 < one.factor < many.factor < 2.0
    assert one.error > many.error > 0
    assert phase_factors([]) == {}
    assert phase_factors([measured("a", 2.0, 0.0)]) == {}


def test_a_merged_table_follows_what_is_newer() -> None:
    old = CostTable(kind="cpu", calls=(measured("train", 1.0, 1.0), measured("ref", 3.0, 1.0)))
    new = CostTable(kind="cpu", date="later", calls=(measured("train", 2.0, 1.0),), lengths=(4, 5))
    both = merge([old, new])
    by_name = {call.call: call for call in both.calls}
    assert 1.0 < by_name["train"].seconds < 2.0
    assert by_name["train"].count == 10
    assert by_name["train"].error > 0.3  # the two differ
    assert by_name["ref"].seconds == 3.0
    assert both.date == "later"
    assert both.lengths == (4, 5)
    again = both
    for _ in range(12):
        again = merge([again, new], keep=0.3)
    assert {call.call: call for call in again.calls}["train"].seconds == pytest.approx(2.0, rel=0.05)


def test_merging_with_itself_changes_no_seconds() -> None:
    both = merge([TABLE, TABLE])
    assert both.factors == CPU
    assert [call.seconds for call in both.calls] == pytest.approx([1.5])
    assert merge([TABLE]).calls == TABLE.calls


def test_phases_that_belong_to_other_factors_are_left_out() -> None:
    profile = CostTable(kind="cpu", factors=replace(CPU, gemm=2.0))
    both = merge([TABLE, profile])
    assert both.phases == {}
    assert both.factors is not None
    assert both.factors.gemm == 2.0
    assert both.calls[0].seconds == 1.5


def test_tables_of_different_devices_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different devices"):
        merge([TABLE, CostTable(kind="H100-SXM")])
