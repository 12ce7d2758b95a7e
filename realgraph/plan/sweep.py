"""`realgraph plan --devices`: the same run on clusters of other sizes, and the cheapest that reaches a target."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.plan.session import Session
from realgraph.planner.advise.servers import with_servers
from realgraph.planner.advise.sweep import resize
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.content import PlannedSize
from realgraph.planner.report.format import seconds_text
from realgraph.planner.report.text import cheapest
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import search

SIZE_SECONDS = 10.0  # of the search for one size, at most


class Swept(Struct, frozen=True):
    """Every size with its period, and the plan that is shown."""

    sizes: tuple[PlannedSize, ...]
    request: PlanRequest  # of the plan that is shown
    # Of the cheapest size that reaches the target, else of the run's own size where that was asked for, else of the
    # largest that has a plan.
    plan: Plan


class Unreached(ConfigError):
    """No size has a plan, or none reaches the target."""

    exit_code = 4


def swept(session: Session, request: PlanRequest, sizes: Sequence[int], target: float | None) -> Swept:
    """A plan for each size. Ctrl-C leaves out sizes that are not begun. Raises Unreached where no size has a plan."""
    planned: list[PlannedSize] = []
    plans: dict[int, tuple[PlanRequest, Plan]] = {}
    for size in sizes:
        if session.stop() and plans:
            break
        session.progress.show(f"planning for {size:,} devices (Ctrl-C ends after it)")
        resized = replace(request, cluster=resize(request.cluster, size))
        limits = session.quick(SIZE_SECONDS, session.limits.gap)
        try:
            resized = with_servers(resized, limits).request
            plan = search(resized, limits)
        except ConfigError as error:
            planned.append(PlannedSize(size, None, 0.0, error.problems[0].text))
            continue
        plans[size] = (resized, plan)
        planned.append(PlannedSize(size, plan.period_seconds, plan.lower_bound_seconds))
    if not plans:
        problems = [Problem(Where("command line", path="--devices"), f"{s.devices} devices: {s.note}") for s in planned]
        raise Unreached(problems)
    reached, own = cheapest(planned, target), request.cluster.n_devices
    chosen = reached.devices if reached is not None else own if own in plans else max(plans)
    return Swept(tuple(planned), *plans[chosen])


def sweep_json(sizes: Sequence[PlannedSize], target: float | None) -> str:
    """The curve as JSON: `sizes`, and the fewest devices that reach the target where one was given."""
    reached = cheapest(sizes, target)
    document = {"sizes": sizes, "target_seconds": target, "cheapest": reached.devices if reached else None}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def unreached(sizes: Sequence[PlannedSize], target: float) -> Unreached:
    """The error where no size is fast enough."""
    fastest = min((size for size in sizes if size.period_seconds), key=lambda size: size.period_seconds or 0.0)
    assert fastest.period_seconds is not None
    text = (
        f"no size reaches {seconds_text(target)} a step: the fastest, {fastest.devices:,} devices, takes "
        f"{seconds_text(fastest.period_seconds)} and at least {seconds_text(fastest.lower_bound_seconds)}"
    )
    return Unreached([Problem(Where("command line", path="--target"), text, "more devices, or a smaller step")])
