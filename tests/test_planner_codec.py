"""Plans as JSON: exact both ways, and edits that went wrong are named by their path."""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.cluster import MOST_DEVICES
from realgraph.planner.options.choices import agrees
from realgraph.planner.plan.codec import plan_from_json, plan_to_json
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.option import SETTINGS, CallOption
from realgraph.planner.plan.plan import TRANSPORTS, Allocation, Hashes, Plan, Turn
from realgraph.planner.request.pins import Pin
from realgraph.planner.search.search import search
from tests.planner_cases import ppo, request

COUNTS = st.integers(0, 2**40)
RANKS = st.integers(1, MOST_DEVICES)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
WORDS = st.text(max_size=12)
LAYOUTS = st.builds(
    Layout,
    mesh=st.builds(DeviceMesh, st.integers(0, MOST_DEVICES - 1), st.integers(1, MOST_DEVICES)),
    dp=RANKS,
    tp=RANKS,
    sharding=st.sampled_from(["replicated", "fsdp"]),
    stages=st.lists(st.lists(st.integers(0, 2**31), max_size=3).map(tuple), max_size=3).map(tuple),
)
ALLOCATIONS = st.builds(
    Allocation,
    layout=LAYOUTS,
    max_tokens_per_microbatch=st.none() | st.integers(1, 2**40),
    kv_cache_tokens=st.none() | st.integers(1, 2**40),
    recompute=st.sampled_from(("none", "selective", "full")),
    schedule=st.sampled_from(("1f1b", "interleaved")),
    chunks=st.integers(1, 8),
    residency=st.sampled_from(["resident", "offloaded", "reallocated"]),
    seconds=SECONDS,
    peak_bytes=COUNTS,
    bound_bytes=COUNTS,
    worst_term=WORDS,
    latency_seconds=SECONDS,
    microbatches=COUNTS,
    running=COUNTS,
    host_bytes=COUNTS,
    input_seconds=SECONDS,
    error=SECONDS,
    prefetch_during=WORDS,
    prefetch_seconds=SECONDS,
)
PLANS = st.builds(
    Plan,
    allocations=st.dictionaries(WORDS, ALLOCATIONS, max_size=4),
    orders=st.dictionaries(st.integers(0, 2000), st.lists(st.builds(Turn, WORDS, st.integers(-3, 3))).map(tuple)),
    hashes=st.builds(Hashes, WORDS, WORDS, WORDS, WORDS),
    period_seconds=SECONDS,
    lower_bound_seconds=SECONDS,
    scope=WORDS,
    bottleneck=st.lists(WORDS).map(tuple),
    latency_seconds=SECONDS,
    starts=st.dictionaries(WORDS, st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    reallocation_seconds=st.dictionaries(WORDS, SECONDS, max_size=3),
    reallocation_transport=st.dictionaries(WORDS, st.sampled_from(TRANSPORTS), max_size=3),
    stopped=WORDS,
    search_seconds=SECONDS,
)


@settings(max_examples=80)
@given(PLANS)
def test_a_plan_survives_its_json_exactly(plan: Plan) -> None:
    assert plan_from_json(plan_to_json(plan)) == plan


@cache
def found() -> Plan:
    return search(request(ppo()))


def changed(*path: str | int, to: Any) -> str:
    """The plan's JSON with one value replaced; a new name adds a field."""
    raw = json.loads(plan_to_json(found()))
    at = raw
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("{", "", "this is no JSON"),
        ("[" * 100_000, "", "this is no JSON"),
        ('{"a": 1, "a": 2}', "", "'a' stands twice"),
        ("[]", "$", "a plan is a JSON object"),
        ("{}", "$", "missing required field `allocations`"),
        (partial(changed, "format", to=7), "$.format", "format 7"),
        (
            partial(changed, "allocations", "ref", "layout", "dp", to="8"),
            "$.allocations.ref.layout.dp",
            "expected `int`, got `str`",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "shardng", to="fsdp"),
            "$.allocations.ref.layout.shardng",
            "'sharding'?",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "sharding", to="fdsp"),
            "$.allocations.ref.layout.sharding",
            "fdsp",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "mesh", "frist", to=0),
            "$.allocations.ref.layout.mesh.frist",
            "'first'?",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "mesh", to=[0, 8]),
            "$.allocations.ref.layout.mesh",
            "expected `object`",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "stages", to=[[14], [-1]]),
            "$.allocations.ref.layout.stages[1][0]",
            ">= 0",
        ),
        (
            partial(changed, "allocations", "ref", "layout", "stages", to=[28]),
            "$.allocations.ref.layout.stages[0]",
            "`array`",
        ),
        (partial(changed, "allocations", "ref", to=None), "$.allocations.ref", "expected `object`"),
        (partial(changed, "allocations", to=[]), "$.allocations", "expected `object`"),
        (partial(changed, "orders", "0", 1, "offset", to=0.5), "$.orders.0[1].offset", "expected `int`"),
        (partial(changed, "orders", "0", 1, "ofset", to=1), "$.orders.0[1].ofset", "'offset'?"),
        (partial(changed, "orders", "x", to=[]), "$.orders", "expected `int`"),
        (partial(changed, "period", to=1.0), "$.period", "'period_seconds'?"),
    ],
)
def test_an_edit_that_went_wrong_is_named(text: str | Callable[[], str], path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_json(text if isinstance(text, str) else text(), "plan.json")
    assert any(
        str(p.where).startswith("plan.json") and path in str(p.where) and says in str(p) for p in caught.value.problems
    ), caught.value


def test_all_mistakes_are_told_at_once() -> None:
    raw = json.loads(changed("allocations", "ref", "layout", "dp", to="8"))
    raw["orders"]["0"][0]["call"] = 5
    raw["scop"] = ""
    with pytest.raises(ConfigError) as caught:
        plan_from_json(json.dumps(raw))
    assert len(caught.value.problems) == 3


def test_a_pin_may_set_all_that_a_plan_chooses_and_a_place() -> None:
    """`Pin` writes its fields out for the reference of the YAML: each has the name and the values of an option's."""
    assert {*Pin.__struct_fields__} == {"first", "devices", *SETTINGS}
    option = CallOption(Layout(DeviceMesh(8, 8), dp=2, tp=2, pp=2), 4096, "full", "interleaved", 4)
    pin = msgspec.convert(option.settings, Pin)
    assert agrees(option, pin)
    for name, other in {
        **option.settings,
        "kv_cache_tokens": 4096,
        "tp": 4,
        "sharding": "fsdp",
        "residency": "offloaded",
    }.items():
        changed = replace(pin, **{name: other})
        assert agrees(option, changed) == (other == option.settings[name])
