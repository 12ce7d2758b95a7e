"""A request's problem with all calls on one mesh and every option there: for rules that may not leave options out.

The search's own tables lack what another option beats; a plan with one layout for a whole role may need just that.
"""

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.spec import Generate
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.moves import Moves
from realgraph.planner.options.pricing import PricedOption, Timed, options_of
from realgraph.planner.options.tables import PreparedProblem, layout_key, option_table
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.search.symmetric import LayoutShape
from realgraph.planner.solve.heuristics import one_mesh


class WholeProblem(Struct, frozen=True, eq=False):
    """A problem of one mesh, with the shape that each layout number stands for."""

    prepared: PreparedProblem
    shapes: dict[int, LayoutShape]


def whole_problem(prepared: PreparedProblem) -> WholeProblem | None:
    """On the largest mesh that every call may lie on, in a mixed cluster one of a single kind; None where none is."""
    request, problem = prepared.request, prepared.problem
    place = one_mesh(problem)
    if place is None:
        return None
    mesh = problem.meshes[place]
    group = prepared.groups[place]
    cluster = request.cluster.groups[group]
    moves = Moves(request, [(mesh, group)], prepared.known.moves)
    layouts: dict[tuple[object, ...], int] = {}
    offered: list[tuple[PricedOption, ...]] = []
    tasks = []
    for task in problem.tasks:
        options = _options(prepared, task.name, mesh, cluster)
        for option in options:
            layouts.setdefault(layout_key(option), len(layouts))
        moves.add(task.name, {0: options})
        tasks.append(replace(task, tables={0: len(offered)}))
        offered.append(options)
    shapes = {
        layouts[layout_key(option)]: LayoutShape(layout.tp, layout.pp, layout.ep, layout.cp)
        for options in offered
        for option in options
        for layout in (option.candidate.layout,)
    }
    whole = replace(
        problem,
        meshes=(mesh,),
        tables=tuple(option_table(options, layouts) for options in offered),
        tasks=tuple(tasks),
        move_seconds=moves.seconds,
        tree=None,
    )
    return WholeProblem(PreparedProblem(request, whole, tuple(offered), (group,), prepared.known), shapes)


def _options(prepared: PreparedProblem, call: str, mesh: DeviceMesh, cluster: Cluster) -> tuple[PricedOption, ...]:
    """Every option of a call on the mesh. Those of calls that do not generate are the same at each staleness."""
    request, known, timed = prepared.request, prepared.known.whole, Timed()
    if (call, mesh) in known:
        return known[call, mesh]
    options = tuple(
        option
        for candidate in candidates(request, call, mesh, cluster)
        for option in options_of(request, call, candidate, cluster, timed)
    )
    if not isinstance(request.graph.calls[call], Generate):
        known[call, mesh] = options
    return options
