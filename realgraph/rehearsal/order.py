"""The order in which devices ran their calls beside the order of the plan."""

from collections.abc import Iterator, Set
from itertools import groupby

from realgraph.planner.plan.plan import REALLOCATION, Plan
from realgraph.rehearsal.observer import StepsSeen


def misordered(plan: Plan, seen: StepsSeen, steps: int, streams: Set[str] = frozenset()) -> Iterator[str]:
    """Devices that did not run their calls in the plan's order, each with both, in words.

    Reallocations, which a first round may not need, and calls whose head is another worker are left out. So are
    `streams`, calls that generate beside others: a session that has begun stands still while others run, also while
    others of its device generate.
    """
    for device, turns in sorted(plan.orders.items()):
        ran = seen.order_on(device, plan.allocations.keys() - streams)
        rounds = range(-1 - max((abs(turn.offset) for turn in turns), default=0), steps + 1)
        turned = (
            turn.call
            for number in rounds
            for turn in turns
            if not turn.call.startswith(REALLOCATION) and turn.call in ran and 0 <= number + turn.offset < steps
        )
        due = tuple(call for call, _ in groupby(turned))
        if ran != due:
            yield f"device {device} ran {', '.join(ran)}; its plan is {', '.join(due)}"
