"""Each rule: what it refuses, alone, where, and in which words."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.check.compile import RULES, compile_graph
from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.facts import Facts
from tests.strategies import BREAKS, TREES, Tree, change, rl_tree, rl_trees, spec_of, where

MESSAGES = yaml.safe_load((Path(__file__).parent / "rule_messages.yaml").read_text("utf-8"))


def problems(tree: Tree, facts: Facts | None = None) -> tuple[Problem, ...]:
    try:
        compile_graph(spec_of(tree), where, facts or Facts())
    except ConfigError as refused:
        return refused.problems
    return ()


def test_every_rule_has_its_break_and_its_words() -> None:
    assert {rule.__name__ for rule in RULES} | {"switch_problems"} == set(BREAKS) == set(MESSAGES["breaks"])


@pytest.mark.parametrize("rule", BREAKS)
def test_a_break_is_refused_in_these_words(rule: str) -> None:
    broken = BREAKS[rule]
    assert problems(broken.base()) == ()
    found = problems(change(broken.base(), broken.changes), broken.facts)
    assert "\n".join(str(problem) for problem in found) == MESSAGES["breaks"][rule].rstrip("\n")
    assert {problem.rule for problem in found} == {rule}


@pytest.mark.parametrize("case", MESSAGES["more"], ids=lambda case: case["says"].split(":")[0])
def test_other_breaks_are_refused_in_these_words(case: Tree) -> None:
    facts = msgspec.convert(case.get("facts", {}), Facts)
    found = problems(change(TREES[case["base"]](), case.get("changes", {})), facts)
    assert "\n".join(str(problem) for problem in found) == case["says"].rstrip("\n")


@pytest.mark.slow
@settings(max_examples=200)
@given(st.sampled_from([rule for rule, broken in BREAKS.items() if broken.base is rl_tree]), st.data())
def test_a_broken_graph_is_refused_by_just_that_rule(rule: str, data: st.DataObject) -> None:
    tree = data.draw(rl_trees())
    assert problems(tree) == ()
    found = problems(change(tree, BREAKS[rule].changes), BREAKS[rule].facts)
    assert {problem.rule for problem in found} == {rule}


def test_all_problems_come_at_once() -> None:
    rules = ("key_type", "head_mismatch", "unknown_input", "truncated_sampling", "function_name")
    changes = {path: value for rule in rules for path, value in BREAKS[rule].changes.items()}
    found = problems(change(rl_tree(), changes), Facts(data_columns={"promt": "question"}))
    assert {problem.rule for problem in found} == set(rules)
    assert list(found) == sorted(found)
