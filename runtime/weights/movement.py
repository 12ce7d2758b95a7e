"""Reallocations of trained weights as one worker takes part in them: made once for each two layouts, counted, verified.

Knows no engine: it asks for the trained parts that lie here, and gives those that come.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import Head, ModelSpec, spec_from_config
from realgraph.planner.plan.axes import head_worker
from realgraph.planner.plan.layout import Layout
from realgraph.planner.request.engine_support import SGLANG_KIND
from realgraph.runtime.engine import Parts, RolloutEngine, TrainEngine, WeightSpec
from realgraph.runtime.job.engine_loss import expendable_workers
from realgraph.runtime.job.job import Job
from realgraph.runtime.models.weights import read_config, resolve
from realgraph.runtime.parallel.checksums import Checksums
from realgraph.runtime.parallel.cuts import layout_boxes, whole_boxes
from realgraph.runtime.parallel.exchange import Reallocation, WeightPart, WorkerParts, reallocation
from realgraph.runtime.parallel.groups import Collectives
from realgraph.runtime.parallel.mapped import MappedRoute
from realgraph.runtime.parallel.routes import Holdings
from realgraph.runtime.parallel.shares import Shares, shares
from realgraph.runtime.weights.handover import FetchedWeights, WeightHandover
from realgraph.runtime.wire.metrics import ArrivedBytes
from realgraph.runtime.wire.protocol import Reallocate


def role_path(models: Mapping[str, ModelRole], role: str) -> str:
    """The source of a role's first weights: its own path, or that of the role it starts as. Raises ConfigError."""
    name: str | None = role
    while name is not None:
        path = models[name].path
        if path is not None:
            return path
        name = models[name].init
    text = f"the role {role!r} has no weights to start from"
    raise ConfigError([Problem(Where(path=f"$.models.{role}.path"), text, "give it a path, or init: another role")])


class Between(NamedTuple):
    """The two sides of a reallocation: the role whose trained weights go, and the layouts; of the second side, too,
    workers that each get all of them. receivers: those of the second that take part; None: all."""

    role: str
    layouts: tuple[Layout, Layout | tuple[int, ...]]
    receivers: frozenset[int] | None = None


class Moved(NamedTuple):
    """A reallocation under way. parts: to be gone through to the end. sums: where it is verified, the checksums of what
    came."""

    route: MappedRoute
    before: ArrivedBytes
    parts: Parts
    sums: Checksums | None = None

    @property
    def arrived(self) -> ArrivedBytes:
        """Bytes that have come from other workers."""
        after = self.route.arrivals.total
        return ArrivedBytes(after.near - self.before.near, after.far - self.before.far)


class Movement:
    """The reallocations of one worker. Collective: senders and receivers of each use it alike.

    trained: the engines here that have trained weights, by role.
    """

    def __init__(self, job: Job, worker: int, collectives: Collectives, trained: Mapping[str, TrainEngine]) -> None:
        self._job, self._worker, self._member, self._trained = job, worker, collectives.member, trained
        self._expendable = expendable_workers(job.graph, job.plan)
        self._routes: dict[Between, _Route] = {}
        self._n_begun: Counter[Between] = Counter()
        self._n_given: Counter[tuple[object, ...]] = Counter()  # by call and engines
        self._given: dict[str, Shares] = {}  # by role
        self._wants: dict[str, Holdings] = {}  # by call

    @contextmanager
    def moved(self, between: Between, source: TrainEngine | RolloutEngine) -> Iterator[Moved]:
        """The parts that come to this worker, while it sends those that others lack. Where they are verified, checksums
        are compared at the end.

        source: the engine here that has the trained weights, else the one that they come to.
        """
        shapes = {spec.name: spec.shape for spec in source.weight_specs()}
        moves, route, shown = self._route(between, source.weight_specs())
        before, owner = route.arrivals.total, self._trained.get(between.role)
        with owner.local_parts() if owner is not None else nullcontext({}) as local:
            segment = owner.segment if owner is not None else None
            place = WorkerParts(self._worker, source.device, local, moves.wants.get(self._worker, {}), segment)
            self._n_begun[between] += 1
            if not self._job.runtime.verifies(self._n_begun[between]):
                yield Moved(route, before, route.bring(place))
                return
            sums = Checksums(moves, place, shapes, shown)
            yield Moved(route, before, route.bring(place).through(sums.watch), sums)
            route.lent += sums.compare(route.send)

    def hand_over(self, handover: WeightHandover, work: Reallocate, trained: Layout) -> None:
        """Give this worker's share of the trained weights to engines in no process group with it. trained: their
        layout."""
        if not work.joined:
            handover.withdraw(work.call)
            return
        owner = self._trained[work.role]
        specs = owner.weight_specs()
        shapes, (dtype,) = {spec.name: spec.shape for spec in specs}, {spec.dtype for spec in specs}
        with owner.local_parts() as local:
            parts = [
                WeightPart(name, box, local[name].values[box.within(local[name].box).slices].to(dtype))
                for name, boxes in self._shares_of(work.role, trained, shapes)[self._worker].items()
                for box in boxes
            ]
            key = (work.call, *work.joined.items())
            self._n_given[key] += 1
            verifies = self._job.runtime.verifies(self._n_given[key])
            handover.give(work, parts, self._wanted(work, shapes), shapes if verifies else None)

    def handed(
        self, handover: WeightHandover, work: Reallocate, trained: Layout, rollout: RolloutEngine
    ) -> FetchedWeights:
        """The trained weights for the engine here, which is in no process group with those who train."""
        specs = rollout.weight_specs()
        shapes, (dtype,) = {spec.name: spec.shape for spec in specs}, {spec.dtype for spec in specs}
        wants = self._wanted(work, shapes)[self._worker]
        return handover.fetch(work, shapes, dtype, self._shares_of(work.role, trained, shapes), wants)

    def _wanted(self, work: Reallocate, shapes: Mapping[str, tuple[int, ...]]) -> Holdings:
        """The boxes that each worker of a call takes of the weights: those that it holds, or all for its server."""
        if work.call not in self._wants:
            layout, in_order = self._job.plan.allocations[work.call].layout, dict(sorted(shapes.items()))
            if self._job.rollout.engine == SGLANG_KIND:
                heads = [head_worker(layout, rank) for rank in range(layout.dp)]
                self._wants[work.call] = dict.fromkeys(heads, whole_boxes(in_order))
            else:
                self._wants[work.call] = layout_boxes(in_order, layout, self._model_of(work.role))
        return self._wants[work.call]

    def _shares_of(self, role: str, trained: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Shares:
        """The parts of the weights, each once, that those who train them give; alike on all workers."""
        if role not in self._given:
            in_order = dict(sorted(shapes.items()))
            self._given[role] = shares(layout_boxes(in_order, trained, self._model_of(role)), in_order)
        return self._given[role]

    def settle(self, role: str) -> None:
        """Before the trained weights of `role` change: wait until no other worker has them on loan. Raises
        CollectiveError with the one that is gone or far behind."""
        for between, route in self._routes.items():
            if between.role == role:
                route.mapped.settle()

    def _route(self, between: Between, specs: Sequence[WeightSpec]) -> "_Route":
        """A reallocation, its messages and shares alike on all workers; made once."""
        if between not in self._routes:
            shapes, (dtype,) = {spec.name: spec.shape for spec in specs}, {spec.dtype for spec in specs}
            model = self._model_of(between.role)
            moves = reallocation(shapes, dtype, between.layouts, self._member, model, between.receivers)
            local = layout_boxes(shapes, between.layouts[0], model)
            shown = shares(local, shapes) if self._job.runtime.verified_updates else {}
            self._routes[between] = _Route(
                moves, MappedRoute(moves, self._worker, self._member.host, self._expendable), shown
            )
        return self._routes[between]

    def _model_of(self, role: str) -> tuple[ModelSpec, Head]:
        """The shape of a role's model, which says how layouts cut it."""
        config = read_config(resolve(role_path(self._job.graph.models, role)))
        return spec_from_config(config, Where()), self._job.graph.models[role].head


class _Route(NamedTuple):
    """A reallocation: what goes to whom, how it gets to this worker, and the boxes that each sender's checksums are
    of."""

    moves: Reallocation
    mapped: MappedRoute
    shown: Shares
