"""Every value that a layout or an allocation of a plan may have is run by engines somewhere here, as their types list
them; what stays refused is what can't be."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.cluster import MOST_DEVICES
from realgraph.planner.plan.codec import plan_from_json, plan_to_json
from realgraph.planner.plan.plan import Allocation
from realgraph.run.planning import plan_for, read_plan
from realgraph.run.requests import request_for
from realgraph.run_file.compose import check_run
from tests import tiny
from tests.runs import finish, merged

# Of measured costs, and of GPUs, whose copies cost what runs beside them nothing: no engine and no schedule reads them.
PREDICTED = ("error", "prefetch_seconds")
BASE: dict[str, Any] = {
    "models": {"actor": {"path": "model", "dtype": "float32"}},
    "data": {"path": "nowhere/prompts", "max_prompt_tokens": 12},
    "batch": {"groups": 8, "max_new_tokens": 12, "max_tokens_per_microbatch": 48},
    "cluster": {"nodes": 2, "devices": 2, "kind": "H100-SXM"},
    "steps": 100,
}
RUNS: dict[str, dict[str, Any]] = {
    "together": {
        "graph": "ppo",
        "batch": {"expected_new_tokens": 2, "max_new_tokens": 100},  # so there is a spare cache
        "allocation": {
            "rollout": {"devices": 4, "dp": 4, "ep": 4},
            "ref_logp": {"devices": 4, "dp": 2, "cp": 2, "sharding": "fsdp", "residency": "offloaded"},
            "values": {"first": 2, "devices": 2, "tp": 2},
            "train_actor": {
                "devices": 2,
                "pp": 2,
                "max_tokens_per_microbatch": 24,
                "schedule": "interleaved",
                "chunks": 2,
                "recompute": "selective",
            },
            "train_critic": {"devices": 4, "dp": 2, "ep": 2, "tp": 2, "recompute": "full", "residency": "offloaded"},
        },
    },
    "ahead": {
        "graph": "grpo",
        "params": {"group_size": 2, "kl_coef": 0.05},
        "batch": {"groups": 4},
        "staleness": 1,
        "allocation": {
            "ref_logp": {"first": 2, "devices": 2, "dp": 2, "residency": "resident"},
            "rollout": {"first": 0, "devices": 1, "kv_cache_tokens": 24},  # a sequence at a time: it falls behind
            # it comes back while the reference runs
            "train": {"first": 2, "devices": 2, "dp": 2, "recompute": "none", "residency": "offloaded"},
        },
    },
    "roomy": {
        "graph": "grpo",
        "params": {"group_size": 2},
        "batch": {"groups": 4, "expected_new_tokens": 2, "max_new_tokens": 100},
        "staleness": 1,
        "allocation": {"rollout": {"first": 0, "devices": 1}, "train": {"first": 1, "devices": 1}},
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    (folder / "model").mkdir()
    shape = tiny.config("qwen3_moe", num_hidden_layers=4).to_json_string()
    (folder / "model" / "config.json").write_text(shape)
    for name, run in RUNS.items():
        (folder / f"{name}.yaml").write_text(json.dumps(merged(BASE, run)))
    return folder


def asked(kind: msgspec.inspect.Type) -> set[object]:
    """The values that a field of this type may have: each value of a literal, none and some of a list, one and more of
    ranks and chunks, more than none of amounts."""
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return set(values)
        case msgspec.inspect.UnionType(types=types):
            return {one for each in types for one in asked(each)}
        case msgspec.inspect.NoneType():
            return {None}
        case msgspec.inspect.IntType(le=most):
            return {"least", "more"} if most is None or most <= MOST_DEVICES else {"more"}
        case msgspec.inspect.VarTupleType():
            return {"none", "some"}
        case msgspec.inspect.FloatType() | msgspec.inspect.StrType():
            return {"set"}
    raise AssertionError(f"no rule says what a field of the type {kind} may be")


def found(kind: msgspec.inspect.Type, value: Any) -> object:
    """The one of `asked` that a value is."""
    match kind:
        case msgspec.inspect.LiteralType() | msgspec.inspect.NoneType():
            return value
        case msgspec.inspect.UnionType(types=types):
            if value is None:
                return None
            return found(next(one for one in types if not isinstance(one, msgspec.inspect.NoneType)), value)
        case msgspec.inspect.VarTupleType():
            return "some" if value else "none"
        case msgspec.inspect.IntType(le=most):
            least = 1 if most is None or most <= MOST_DEVICES else 0
            return "more" if value > least else "least"
    return "set" if value else None


def gather(
    kind: msgspec.inspect.Type, values: list[Any], place: str, seen: dict[str, tuple[set[object], set[object]]]
) -> None:
    """Field by field, what may be and what was, of a struct and of those in it."""
    assert isinstance(kind, msgspec.inspect.StructType)
    for field in kind.fields:
        own, name = [getattr(value, field.name) for value in values], f"{place}{field.name}"
        if isinstance(field.type, msgspec.inspect.StructType):
            gather(field.type, own, f"{name}.", seen)
        else:
            seen[name] = (asked(field.type), {found(field.type, value) for value in own})


@pytest.mark.slow
def test_every_value_of_every_field_is_run(home: Path) -> None:
    """With the numbers of one process, where the clock has no part in them: a field or value without a run fails."""
    ran: list[Allocation] = []
    for name in RUNS:
        finish(home, "rehearse", str(home / f"{name}.yaml"), "--keep", str(home / name), name=name)
        plan = plan_from_json((home / name / "planned" / "plan.json").read_text(), "plan.json")
        ran += plan.allocations.values()
    seen: dict[str, tuple[set[object], set[object]]] = defaultdict(lambda: (set(), set()))
    gather(msgspec.inspect.type_info(Allocation), ran, "", seen)
    missing = {name: may - was for name, (may, was) in seen.items() if may - was and name not in PREDICTED}
    assert missing == {}
    assert set(PREDICTED) <= seen.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "size", "says"),
    [
        ("tp", 3, "tp 3 does not divide 4 attention heads"),
        ("tp", 8, "tp 8 does not divide 4 attention heads"),
        ("pp", 8, "pp 8 is more than the 4 layers"),
        ("ep", 3, "ep 3 does not divide 4 experts"),
    ],
)
def test_what_can_not_be_is_refused_as_a_pin_and_in_an_edited_plan(home: Path, axis: str, size: int, says: str) -> None:
    """Each at its place in its file."""
    file = home / "together.yaml"
    machine = ["cluster={nodes: 1, devices: 8, kind: H100-SXM}", "allocation=null"]
    checked = check_run(file, machine, weights=False)
    request = request_for(checked)
    edited = json.loads(plan_to_json(plan_for(checked, request)))
    edited["allocations"]["train_actor"]["layout"][axis] = size
    (home / "edited.json").write_text(json.dumps(edited))
    with pytest.raises(ConfigError) as refused:
        read_plan(home / "edited.json", request)
    at = f"$.allocations.train_actor.layout.{axis}"
    told = [(problem.where.file, problem.text) for problem in refused.value.problems if problem.where.path == at]
    assert (str(home / "edited.json"), says) in told
    pinned = check_run(file, [machine[0], f"allocation={{train_actor: {{{axis}: {size}}}}}"], weights=False)
    with pytest.raises(ConfigError) as refused:
        plan_for(pinned, request_for(pinned))
    assert any(p.where.path == f"$.allocation.train_actor.{axis}" and says in p.text for p in refused.value.problems)
