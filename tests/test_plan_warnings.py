"""Settings that have no effect under the plan of a run: warned of, once the plan is known."""

from pathlib import Path

import pytest

from realgraph.run.plan_warnings import plan_warnings
from realgraph.run.running import prepare
from tests.runs import GRPO, home, write_run

__all__ = ["home"]

APART = "allocation={rollout: {first: 0, devices: 1}, train: {first: 1, devices: 1}}"
TWO = "allocation={rollout: {first: 0, devices: 2}, train: {first: 2, devices: 2}}"
SHARED = "allocation={rollout: {first: 0, devices: 2}, train: {first: 0, devices: 1}}"
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "engines that may be lost": (["cluster.devices=4", TWO, "rollout.replacements=1", "overdue=drop"], []),
    "as many as there are": (
        ["cluster.devices=4", TWO, "rollout.min_engines=2"],
        [("$.rollout.min_engines", "the plan has 2 engines, so the loss of any ends the run")],
    ),
    "one engine": (
        [APART, "rollout.min_engines=2"],
        [("$.rollout.min_engines", "the plan has 1 engine, so the loss of any ends the run")],
    ),
    "a synchronous plan": (
        [SHARED, "rollout.replacements=1", "rollout.interrupt=wait", "overdue=drop"],
        [(f"$.{name}", "the plan is synchronous") for name in ("rollout.interrupt", "rollout.replacements", "overdue")],
    ),
    "a synchronous run, of which check warns": ([SHARED, "rollout.replacements=1", "staleness=0"], []),
    "defaults": ([SHARED], []),
    "copies of weights": ([APART, "runtime.verify_weights=1"], []),
    "weights read in place": (
        ["allocation={rollout: {first: 0, devices: 1}, train: {first: 0, devices: 1}}", "runtime.verify_weights=1"],
        [("$.runtime.verify_weights", "every call reads the trained weights in place")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_plan_makes_useless_is_named(home: Path, case: str) -> None:
    overrides, expected = CASES[case]
    file = write_run(home, "warned", GRPO, {"staleness": 1, "steps": 2})
    prepared = prepare(file, overrides, None)
    found = [*plan_warnings(prepared.checked, prepared.job.plan, prepared.request)]
    assert [problem.where.path for problem in found] == [path for path, _ in expected]
    assert all(said in problem.text and problem.hint for problem, (_, said) in zip(found, expected, strict=True))
