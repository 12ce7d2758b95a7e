"""The plan of a run as its rehearsal follows it: every layout, order and residency; only tokens are fewer, and weights
come to embedded engines where the plan has servers."""

import math

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.options.calls import sample_tokens, sized
from realgraph.planner.options.constraints import lacking_transport
from realgraph.planner.plan.plan import Allocation, Plan, Transport
from realgraph.planner.request.request import PlanRequest, hashes
from realgraph.planner.search.search import reprice
from realgraph.rehearsal.scale import ToyScale


def toy_plan(plan: Plan, toy: PlanRequest, scale: ToyScale, typical: float) -> Plan:
    """The plan for the toy run, with predictions for it. typical: tokens of a sample. Raises ConfigError where the
    engines can't follow it."""
    planned = plan.allocations.items()
    longest = {name: sample_tokens(sized(toy, name)) for name, _ in planned}
    allocations = {name: _allocation(one, scale, typical, longest[name]) for name, one in planned}
    ways = {name: _way(toy, name, transport) for name, transport in plan.reallocation_transport.items()}
    small = replace(plan, allocations=allocations, reallocation_transport=ways, hashes=hashes(toy))
    problems = validate(small, toy)
    if problems:
        raise ConfigError(problems)
    return reprice(toy, small)


def _way(toy: PlanRequest, call: str, transport: Transport) -> Transport:
    """The way of new weights to a call: the plan's, where it is not one of servers alone."""
    known = not lacking_transport(toy.engine, toy.graph.calls[call], transport)
    return transport if known else toy.engine.transports_to(toy.graph.calls[call])[0]


def _allocation(allocation: Allocation, scale: ToyScale, typical: float, longest: int) -> Allocation:
    """longest: tokens of the longest sample of the call, which is longer than others where its prompts are written."""
    tokens, cache, shared = allocation.max_tokens_per_microbatch, allocation.kv_cache_tokens, allocation.layout.cp
    spare = allocation.spare_cache_tokens
    if tokens is not None:
        tokens = math.ceil(max(longest, scale.microbatch(tokens * shared, typical)) / shared)
    return replace(
        allocation,
        max_tokens_per_microbatch=tokens,
        kv_cache_tokens=None if cache is None else max(longest, scale.cache(cache, typical)),
        running=scale.sequences(allocation.running),
        spare_cache_tokens=scale.cache(spare, typical) if spare else 0,
        spare_running=scale.sequences(allocation.spare_running) if allocation.spare_running else 0,
    )
