"""Plans that were edited by hand: every reason why one can't run, with its place in the file."""

from collections.abc import Callable

import msgspec
import pytest

from realgraph.planner.feasibility.validate import validate
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages
from realgraph.planner.plan.plan import Plan, Turn
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.cost_table import CostTable, PhaseFactor
from realgraph.planner.request.engine_support import TORCH
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest, at_staleness, hashes
from realgraph.planner.search.search import reprice, search
from tests.planner_cases import cluster, grpo, ppo, request

replace = msgspec.structs.replace


def edited(plan: Plan, call: str, **changes: object) -> Plan:
    allocation = plan.allocations[call]
    layout_fields = {name: value for name, value in changes.items() if name in Layout.__struct_fields__}
    rest = {name: value for name, value in changes.items() if name not in layout_fields}
    changed = replace(allocation, layout=replace(allocation.layout, **layout_fields), **rest)
    return replace(plan, allocations={**plan.allocations, call: changed})


_found: list[tuple[PlanRequest, Plan]] = []


def found(asked: PlanRequest) -> Plan:
    """The plan of a request below, searched once, when it is first asked for: no import waits for it."""
    plan = next((plan for other, plan in _found if other is asked), None)
    if plan is None:
        plan = search(asked)
        _found.append((asked, plan))
    return plan


PPO = request(ppo(), "Qwen/Qwen3-0.6B")
LATE = tuple(Turn(name) for name in ("ref", "values", "actor_train", "critic_train", "generate"))


@pytest.mark.parametrize(
    ("edit", "path", "says"),
    [
        (
            lambda plan: edited(plan, "generate", cp=2, dp=4),
            "$.allocations.generate.layout.cp",
            "a decode step has one",
        ),
        (lambda plan: edited(plan, "ref", tp=3, dp=2), "$.allocations.ref.layout.tp", "set tp to 1, 2, 4, 8 or 16"),
        (lambda plan: edited(plan, "ref", dp=4), "$.allocations.ref.layout", "the mesh has 8 devices"),
        (lambda plan: edited(plan, "ref", dp=0), "$.allocations.ref.layout.dp", "at least 1"),
        (
            lambda plan: edited(plan, "ref", mesh=DeviceMesh(4, 8)),
            "$.allocations.ref.layout.mesh",
            "not all of the cluster's",
        ),
        (
            lambda plan: edited(plan, "generate", sharding="fsdp"),
            "$.allocations.generate.layout.sharding",
            "whole weights",
        ),
        (
            lambda plan: edited(plan, "generate", kv_cache_tokens=10),
            "$.allocations.generate.kv_cache_tokens",
            "hold no sample",
        ),
        (
            lambda plan: edited(plan, "generate", kv_cache_tokens=None),
            "$.allocations.generate.kv_cache_tokens",
            "has no tokens",
        ),
        (
            lambda plan: edited(plan, "generate", max_tokens_per_microbatch=9),
            "$.allocations.generate.max_tokens",
            "this one has kv_cache_tokens",
        ),
        (
            lambda plan: edited(plan, "ref", kv_cache_tokens=9),
            "$.allocations.ref.kv_cache_tokens",
            "belongs to generate calls",
        ),
        (
            lambda plan: edited(plan, "ref", max_tokens_per_microbatch=None),
            "$.allocations.ref.max_tokens",
            "has no tokens",
        ),
        (lambda plan: edited(plan, "ref", max_tokens_per_microbatch=1 << 24), "$.allocations.ref", "GB on device 0"),
        (
            lambda plan: edited(plan, "generate", residency="offloaded"),
            "$.allocations.generate.residency",
            "weights that 'actor_train' trains",
        ),
        (
            lambda plan: edited(plan, "values", residency="offloaded"),
            "$.allocations.values.residency",
            "'critic_train' trains",
        ),
        (
            lambda plan: edited(plan, "ref", residency="reallocated"),
            "$.allocations.ref.residency",
            "weights that nothing trains",
        ),
        (
            lambda plan: edited(plan, "actor_train", residency="reallocated"),
            "$.allocations.actor_train.residency",
            "trains its weights itself",
        ),
        (
            lambda plan: edited(plan, "ref", dp=1, tp=8, sharding="fsdp"),
            "$.allocations.ref.layout.sharding",
            "of which this layout has one",
        ),
        (
            lambda plan: replace(plan, orders={**plan.orders, 3: plan.orders[3][1:]}),
            "$.orders.3",
            "'generate' is missing",
        ),
        (lambda plan: replace(plan, orders={**plan.orders, 9: ()}), "$.orders.9", "devices 0 to 7"),
        (
            lambda plan: replace(plan, orders={**plan.orders, 0: (*plan.orders[0], Turn("ref"))}),
            "$.orders.0",
            "2 times",
        ),
        (lambda plan: replace(plan, orders={**plan.orders, 0: (*plan.orders[0], Turn("rf"))}), "$.orders.0", "'ref'?"),
        (
            lambda plan: replace(plan, orders={**plan.orders, 0: (Turn("generate", 1), *plan.orders[0][1:])}),
            "$.orders.1",
            "offset 0",
        ),
        (lambda plan: replace(plan, orders=dict.fromkeys(range(8), LATE)), "$.orders", "deadlocks: generate -> "),
        (lambda plan: replace(plan, hashes=replace(plan.hashes, workload="x")), "$.hashes.workload", "another batch"),
        (lambda plan: replace(plan, hashes=replace(plan.hashes, cluster="x")), "$.hashes.cluster", "another cluster"),
        (lambda plan: replace(plan, format=99), "$.format", "format 99"),
        (
            lambda plan: replace(plan, allocations={k: v for k, v in plan.allocations.items() if k != "ref"}),
            "$.allocations",
            "'ref'",
        ),
        (
            lambda plan: replace(plan, allocations={**plan.allocations, "reff": plan.allocations["ref"]}),
            "$.allocations.reff",
            "'ref'?",
        ),
        (
            lambda plan: replace(plan, allocations={**plan.allocations, "reward": plan.allocations["ref"]}),
            "$.allocations.reward",
            "no devices",
        ),
    ],
)
def test_an_invalid_plan_is_refused_with_its_place(edit: Callable[[Plan], Plan], path: str, says: str) -> None:
    problems = validate(edit(found(PPO)), PPO, "plan.json")
    assert problems
    assert any(str(p.where).startswith(f"plan.json: {path}") and says in str(p) for p in problems), problems


ANY = request(ppo(), "Qwen/Qwen3-0.6B", cluster(nodes=4))
ALL = DeviceMesh(0, 32)


@pytest.mark.parametrize(
    ("axes", "axis", "says"),
    [
        ({"tp": 32}, "tp", "16 attention heads"),
        ({"pp": 32}, "pp", "28 layers"),
        ({"dp": 32, "ep": 4}, "ep", "has none"),
        ({"dp": 16, "tp": 2, "ep": 3}, "ep", "does not divide the 32 devices of a stage"),
        ({"dp": 32, "tp": 0}, "tp", "at least 1"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_is_refused(axes: dict[str, int], axis: str, says: str) -> None:
    layout = {"mesh": ALL, "dp": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "sharding": "replicated"} | axes
    problems = validate(edited(found(ANY), "ref", **layout), ANY)
    assert any(p.where.path == f"$.allocations.ref.layout.{axis}" and says in p.text for p in problems), problems


def test_offsets_that_agree_are_valid_and_overlap_steps() -> None:
    """The critic trains beside the next step's generation, which this cluster gives a half each."""
    halves = {"generate": DeviceMesh(0, 4), "critic_train": DeviceMesh(4, 4)}
    plan = found(PPO)
    for name, mesh in halves.items():
        plan = edited(plan, name, mesh=mesh, dp=4, pp=1, stages=(), schedule="1f1b", chunks=1)
    plan = edited(plan, "critic_train", max_tokens_per_microbatch=4096)  # half the devices have its states
    shared = (Turn("ref"), Turn("values"), Turn("actor_train"))
    early = {d: (Turn("generate"), *shared) for d in range(4)}
    late = {d: (Turn("critic_train", -1), *shared) for d in range(4, 8)}
    plan = replace(plan, orders=early | late)
    assert validate(plan, PPO) == ()
    assert reprice(PPO, plan).period_seconds > 0


def test_hashes_change_with_what_predictions_depend_on_and_with_nothing_else() -> None:
    base = hashes(PPO)
    train = PPO.graph.calls["actor_train"]
    retuned = {**PPO.graph.calls, "actor_train": replace(train, lr=0.5, temperature=0.7)}
    assert hashes(replace(PPO, graph=replace(PPO.graph, calls=retuned))) == base
    doubled = {**PPO.graph.calls, "actor_train": replace(train, minibatches=2)}
    assert hashes(replace(PPO, graph=replace(PPO.graph, calls=doubled))).graph != base.graph
    assert hashes(replace(PPO, workload=replace(PPO.workload, groups=8))).workload != base.workload
    assert hashes(at_staleness(replace(PPO, graph=ppo(staleness=1)), 1)) == base
    assert hashes(replace(PPO, cluster=cluster("H200"))).cluster != base.cluster


def test_a_plan_runs_under_every_staleness_bound_that_it_keeps_to() -> None:
    asked = at_staleness(replace(PPO, graph=ppo(staleness=2)), 2)
    plan = search(asked)
    assert 1 <= plan.staleness <= 2
    for bound in (plan.staleness, 2, 7):
        assert validate(plan, at_staleness(asked, bound)) == ()
    (problem,) = validate(plan, at_staleness(asked, 0), "plan.json")
    assert problem.where.path == "$.staleness"
    assert f"lets samples lag {plan.staleness} steps" in problem.text
    assert "the run allows 0 to 0" in problem.text
    assert reprice(at_staleness(asked, 7), plan).period_seconds == pytest.approx(plan.period_seconds, rel=1e-9)


# --- reallocations in the orders --------------------------------------------------------------------------------------

APART = request(grpo(), pins={"rollout": Pin(first=0, devices=4), "train": Pin(first=4, devices=4)})
MOVE = Turn("reallocate:rollout", 0)


def without_moves(plan: Plan) -> Plan:
    kept = {d: tuple(turn for turn in order if turn.call != MOVE.call) for d, order in plan.orders.items()}
    return replace(plan, orders=kept)


def test_a_plan_may_leave_reallocations_out_of_its_orders() -> None:
    assert all(any(turn.call == MOVE.call for turn in order) for order in found(APART).orders.values())
    assert validate(found(APART), APART) == ()
    implied = without_moves(found(APART))
    assert validate(implied, APART) == ()
    assert reprice(APART, implied).period_seconds <= found(APART).period_seconds * (1 + 1e-9)
    assert reprice(APART, found(APART)).reallocation_seconds == found(APART).reallocation_seconds


@pytest.mark.parametrize(
    ("orders", "path", "says"),
    [
        ({5: (Turn("train"),)}, "$.orders.5", "both meshes of the reallocation have this device"),
        ({5: (MOVE, MOVE, Turn("train"))}, "$.orders.5", "2 times"),
        ({5: (Turn("reallocate:train"), MOVE, Turn("train"))}, "$.orders.5", "where none are needed"),
        ({5: (Turn("reallocate:rollout", 3), Turn("train"))}, "$.orders.5", "offset 3"),
    ],
)
def test_a_reallocation_in_the_wrong_place_is_refused(
    orders: dict[int, tuple[Turn, ...]], path: str, says: str
) -> None:
    problems = validate(replace(found(APART), orders=found(APART).orders | orders), APART, "plan.json")
    assert any(str(p.where).startswith(f"plan.json: {path}") and says in str(p) for p in problems), problems


def test_a_table_of_costs_that_changed_is_told_and_a_missing_one_is_not() -> None:
    costs = CostTable(name="here", phases={"train": PhaseFactor(factor=2.0)})
    plan = search(replace(APART, costs=costs))
    assert validate(plan, APART) == ()
    assert validate(plan, replace(APART, costs=costs)) == ()
    other = replace(APART, costs=replace(costs, name="elsewhere"))
    assert [p.where.path for p in validate(plan, other)] == ["$.hashes.costs"]


def test_the_wide_space_validates_what_other_engines_refuse() -> None:
    pins = {"train": Pin(tp=4, pp=2), "rollout": Pin(pp=2)}
    wide = request(grpo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2), pins=pins)
    plan = search(wide)
    assert validate(plan, wide) == ()
    problems = validate(plan, replace(wide, engine=replace(TORCH, generate_axes=("tp",))), "plan.json")
    places = {p.where.path for p in problems}
    assert "$.allocations.rollout.layout.pp" in places
    assert not places & {"$.allocations.train.layout.tp", "$.allocations.train.layout.pp"}
    full = replace(plan.allocations["train"], residency="offloaded")
    tiny = replace(wide, constraints=Constraints(host_memory_gb=1.0))
    told = validate(replace(plan, allocations={**plan.allocations, "train": full}), tiny)
    assert any("wait in the memory of node" in p.text for p in told), told


# --- layers of stages -------------------------------------------------------------------------------------------------

PIPED = request(ppo(), "Qwen/Qwen3-0.6B", cluster(), pins={"actor_train": Pin(pp=4, schedule="1f1b")})


def test_a_plan_records_the_layers_of_its_stages_and_may_leave_them_out() -> None:
    """Qwen3-0.6B: the head takes as long as ten of its 28 layers."""
    assert found(PIPED).allocations["actor_train"].layout.stages == ((9,), (9,), (9,), (1,))
    assert all(bool(one.layout.stages) == (one.layout.pp > 1) for one in found(PIPED).allocations.values())
    left = edited(found(PIPED), "actor_train", stages=())
    assert validate(left, PIPED) == ()
    assert reprice(PIPED, left) == reprice(PIPED, found(PIPED))


def test_uneven_stages_by_hand_are_valid_and_priced() -> None:
    even = edited(found(PIPED), "actor_train", stages=((7,),) * 4)
    assert validate(even, PIPED) == ()
    slower, plain = (
        reprice(PIPED, even).allocations["actor_train"],
        reprice(PIPED, found(PIPED)).allocations["actor_train"],
    )
    assert slower.layout.stages == ((7,),) * 4
    assert slower.seconds > plain.seconds


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (((9,), (9,), (10,)), "3 stages have layers, pp is 4"),
        (((9,), (9,), (9,), (0,)), "a stage without layers"),
        (((9,), (9,), (9,), (2,)), "the stages have 29 layers, the model 28"),
        (((9,), (9,), (5, 4), (1,)), "each stage needs 1 number of layers"),
    ],
)
def test_stages_that_are_not_the_models_are_refused(stages: Stages, says: str) -> None:
    problems = validate(edited(found(PIPED), "actor_train", stages=stages), PIPED, "plan.json")
    assert [(p.where.path, says in p.text) for p in problems] == [("$.allocations.actor_train.layout.stages", True)]


def test_what_runs_under_an_interleaved_layout_finds_its_layers_there() -> None:
    """It reads the trained copy in place where it leaves the stages out, and what it says has as many chunks."""
    asked = replace(PIPED, pins={"critic_train": Pin(pp=2, schedule="interleaved")})
    plan = search(asked)
    train = plan.allocations["critic_train"]
    assert len(train.layout.stages[0]) == train.chunks > 1
    here = {name: getattr(train.layout, name) for name in Layout.__struct_fields__}
    orders = {d: tuple(t for t in turns if t.call != "reallocate:values") for d, turns in plan.orders.items()}
    near = reprice(asked, edited(replace(plan, orders=orders), "values", **here | {"stages": ()}))
    assert validate(near, asked) == ()
    assert near.allocations["values"].layout == train.layout
    assert near.reallocation_transport["values"] == "in_place"
    totals = [sum(chunks) for chunks in train.layout.stages]
    other = ((totals[0] - 1,), (totals[1] + 1,))
    problems = validate(edited(near, "values", stages=other), asked)
    assert [p.where.path for p in problems] == ["$.allocations.values.layout.stages"]
    assert f"needs {train.chunks} numbers of layers" in problems[0].text
