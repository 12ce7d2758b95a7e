"""The plan of a run as its rehearsal follows it: every layout, order and residency; only tokens are fewer."""

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.options.calls import sample_tokens
from realgraph.planner.plan.plan import Allocation, Plan
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.search import reprice
from realgraph.rehearsal.scale import ToyScale


def toy_plan(plan: Plan, toy: PlanRequest, scale: ToyScale) -> Plan:
    """The plan for the toy run, with predictions for it. Raises ConfigError where the engines can't follow it."""
    allocations = {name: _allocation(allocation, toy, scale) for name, allocation in plan.allocations.items()}
    small = replace(plan, allocations=allocations, hashes=hashes(toy))
    problems = validate(small, toy)
    if problems:
        raise ConfigError(problems)
    return reprice(toy, small)


def _allocation(allocation: Allocation, toy: PlanRequest, scale: ToyScale) -> Allocation:
    tokens, cache = allocation.max_tokens_per_microbatch, allocation.kv_cache_tokens
    return replace(
        allocation,
        max_tokens_per_microbatch=None if tokens is None else scale.tokens(tokens),
        kv_cache_tokens=None if cache is None else max(sample_tokens(toy), scale.tokens(cache)),
        running=scale.sequences(allocation.running),
    )
