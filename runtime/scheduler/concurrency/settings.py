"""The numbers of a run that bound its work in flight, before anything is measured."""

import math

from msgspec import Struct

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.plan.plan import Plan
from realgraph.runtime.job.job import Job


class ConcurrencySettings(Struct, frozen=True):
    """The numbers that a run sets. slots: sequences that all engines run at once; infinite where nobody says. fixed:
    the user says, and they are to be filled. surplus: groups begun beyond what batches need. takes_overdue: batches
    have tokens beyond the bound, where there are any."""

    per_batch: int
    bound: int
    ahead: int  # steps by which admission may run ahead: places for 1 + ahead batches
    slots: float
    samples_per_group: int
    fixed: bool
    n_engines: int = 1
    surplus: int = 0
    takes_overdue: bool = True
    needed: int = 0  # batches that the plan's turns need besides the one that trains

    @property
    def places(self) -> int:
        """Groups that admission lets in at most."""
        return (1 + self.ahead) * self.per_batch + self.surplus


def settings_of(job: Job, n_engines: int) -> ConcurrencySettings | None:
    """Those of a job that trains what makes the samples of its groups; None where its plan is synchronous. n_engines:
    that make them."""
    if not job.graph.generates or not job.plan.staleness:
        return None
    running = job.max_running(job.graph.generates[0])
    return ConcurrencySettings(
        per_batch=job.batch.groups,
        bound=job.staleness,
        ahead=job.plan.staleness,
        slots=running * n_engines if running else math.inf,
        samples_per_group=job.graph.samples_per_group,
        fixed=job.rollout.max_running is not None,
        n_engines=n_engines,
        surplus=job.batch.surplus,
        takes_overdue=job.overdue in ("mask", "allow"),
        needed=batches_needed(job.graph, job.plan),
    )


def batches_needed(graph: Graph, plan: Plan) -> int:
    """Batches that have to be there before one is trained, besides that one: those of calls whose turns come first."""
    role, needed = graph.role(graph.generates[0]), 0
    trained = [name for name, call in graph.calls.items() if isinstance(call, Train) and call.model == role]
    for order in set(plan.orders.values()):
        for place, turn in enumerate(order):
            if turn.call == trained[-1]:
                earlier = [
                    other.offset - turn.offset - (number > place)
                    for number, other in enumerate(order)
                    if other.call in graph.calls and not isinstance(graph.calls[other.call], Generate)
                ]
                needed = max(needed, *earlier)
    return needed
