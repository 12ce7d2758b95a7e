"""Measured costs narrow the bar round a prediction no further than records of measurements allow."""

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.published_errors import GRID, OWN_CALLS, OWN_RESULTS
from realgraph.planner.costs.spread import BAR_SHARE, MEASURED_CPU, SPREADS, half_width, measured_deviation
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import phase_of, setting_of, setting_seconds
from realgraph.planner.options.holdings import candidate_of
from realgraph.planner.options.pricing import MEASURED_SETTINGS
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.cost_table import CostTable, MeasuredCall
from realgraph.planner.request.request import PlanRequest, call_hashes
from realgraph.planner.search.period_error import period_error
from realgraph.planner.search.search import reprice, search
from tests.planner_cases import cluster, grpo, request

SMALL = Workload(8, 8, 16, 32, 16.0)


def ran_as(asked: PlanRequest, plan: Plan, call: str) -> dict[str, Any]:
    """The hashes and settings of a call as a table of costs has them."""
    candidate = candidate_of(asked, plan.allocations, call)
    now = {**candidate.settings, "devices": candidate.layout.mesh.n_devices}
    model, workload = call_hashes(asked, call)
    return {"model": model, "workload": workload, **{name: now[name] for name in MEASURED_SETTINGS}}


def measured_calls(asked: PlanRequest, plan: Plan, factor: float) -> tuple[MeasuredCall, ...]:
    """All calls, each so many times as long as formulas say of it."""
    told = []
    for name, one in plan.allocations.items():
        candidate = candidate_of(asked, plan.allocations, name)
        predicted = setting_seconds(asked, name, setting_of(asked, name, one.layout, asked.cluster), candidate)
        told.append(
            MeasuredCall(
                call=name,
                phase=phase_of(asked.graph.calls[name]),
                **ran_as(asked, plan, name),
                seconds=factor * predicted,
                predicted_seconds=predicted,
                count=3,
            )
        )
    return tuple(told)


def test_repeats_of_runs_tell_the_deviation_of_a_measured_call_on_a_cpu() -> None:
    """The least of a grid of 0.01 with which 80 % of the calls' median repeats lie within the bar of their least."""
    rows = [row for file in OWN_RESULTS for row in json.loads(file.read_text("utf-8"))["rows"]]
    for call, phase in OWN_CALLS.items():
        values = [math.log1p(row["spread"]) for row in rows if row["call"] == call]
        within = [sum(value <= half_width(one) for value in values) / len(values) for one in GRID]
        assert MEASURED_CPU[phase] == next(one for one, share in zip(GRID, within, strict=True) if share >= BAR_SHARE)


@pytest.mark.parametrize("kind", ["H100-SXM", "cpu"])
def test_repeats_that_agree_do_not_make_a_step_certain(kind: str) -> None:
    """All calls measured exactly, thrice alike: their seconds stand, and the bar keeps what repeats do not show."""
    asked = request(grpo("float32"), "Qwen/Qwen3-0.6B", cluster(kind, 2), workload=SMALL)
    asked = replace(asked, models={"actor": replace(asked.models["actor"], layers=2, vocab=1024)})
    plan = search(asked)
    calls = measured_calls(asked, plan, 1.5)
    measured = replace(asked, costs=CostTable(calls=calls))
    again = reprice(measured, plan)
    for name, one in again.allocations.items():
        phase = phase_of(asked.graph.calls[name])
        took = next(call.seconds for call in calls if call.call == name)
        assert one.seconds == pytest.approx(took + one.step_end_seconds)
        assert one.error == measured_deviation(phase, cpu=kind == "cpu") > 0
    assert period_error(measured, again) >= SPREADS["step"]["plain"]
    low, high = again.period_bar_seconds
    assert high / low >= math.exp(2 * half_width(SPREADS["step"]["plain"]))


def test_what_was_measured_takes_as_many_times_as_long_as_formulas_say_of_longer_samples() -> None:
    """The seconds that were measured are of the lengths that the run had: other lengths are not as fast."""
    asked = request(grpo("float32"), "Qwen/Qwen3-0.6B", cluster("cpu", 2), workload=SMALL)
    asked = replace(asked, models={"actor": replace(asked.models["actor"], layers=2, vocab=1024)})
    plan = search(asked)
    longer = replace(asked, workload=replace(SMALL, mean_new_tokens=2 * SMALL.mean_new_tokens))
    table = CostTable(calls=measured_calls(asked, plan, 1.5))
    formulas, measured = reprice(longer, plan), reprice(replace(longer, costs=table), plan)
    for name, one in measured.allocations.items():
        end = one.step_end_seconds
        assert one.seconds - end == pytest.approx(1.5 * (formulas.allocations[name].seconds - end))
        assert one.seconds > 1.2 * reprice(replace(asked, costs=table), plan).allocations[name].seconds
