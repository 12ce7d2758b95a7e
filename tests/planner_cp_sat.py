"""A planning problem as one constraint program for CP-SAT (ortools), an oracle that shares no code with the search.

Seconds become whole numbers of 1 / `SCALE` s. Presence literals choose an option of each task; two tasks whose chosen
meshes overlap take one integer k of a small range, by literals, so that each constraint is linear in the period.
"""

from itertools import combinations

from msgspec import Struct
from ortools.sat.python import cp_model

from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import reallocation_node
from realgraph.planner.plan.problem import Choice, Move, SearchProblem, SearchTask
from tests.planner_oracles import every_choice, table_of

SCALE = 100  # ticks of a second
TURNS = 3  # integers k tried: -TURNS .. TURNS + 1

Var = cp_model.IntVar


class Place(Struct, frozen=True, eq=False):
    """A task or move of the program. present: the literals that choose a mesh, or a move's union of two."""

    name: str
    start: Var
    seconds: Var
    latency: Var
    present: dict[tuple[DeviceMesh, ...], list[Var]]


class Program(Struct, frozen=True, eq=False):
    """The model so far; `chosen` has the presence literal of every option of a task."""

    problem: SearchProblem
    model: cp_model.CpModel
    period: Var
    horizon: int
    chosen: dict[str, dict[Choice, Var]]
    places: dict[str, Place]


class Verdict(Struct, frozen=True):
    """CP-SAT's answer, in seconds: the period (inf where it found none) and its own bound, which is the period where
    that is proven, and inf where no plan fits."""

    period: float
    bound: float
    proven: bool


def ticks(seconds: float) -> int:
    return round(seconds * SCALE)


def cp_sat(problem: SearchProblem, seconds: float) -> Verdict:
    """The least period that it finds in so many seconds, to 1 / SCALE s of each duration."""
    longest = sum(
        max(ticks(float(problem.tables[t].latency.max())) for t in task.tables.values()) for task in problem.tasks
    )
    horizon = 4 * (longest + sum(ticks(p.delay) for p in problem.precedences) + ticks(problem.floor_seconds)) + 1000
    model = cp_model.CpModel()
    period = model.new_int_var(ticks(problem.floor_seconds), horizon, "period")
    program = Program(problem, model, period, horizon, {}, {})
    for task in problem.tasks:
        _add_task(program, task)
    for p in problem.precedences:
        left, right = program.places[p.source], program.places[p.target]
        model.add(right.start >= left.start + left.latency + ticks(p.delay) - p.distance * period)
    for move in problem.moves:
        _add_move(program, move)
    for left, right in combinations(program.places.values(), 2):
        _keep_apart(program, left, right)
    _limit_load(program)
    _limit_memory(program)
    _tie(program)
    model.minimize(period)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Verdict(float("inf"), float("inf"), True)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    best = solver.objective_value / SCALE if found else float("inf")
    return Verdict(best, solver.best_objective_bound / SCALE, status == cp_model.OPTIMAL)


def _add_task(program: Program, task: SearchTask) -> None:
    model, problem = program.model, program.problem
    chosen = {choice: model.new_bool_var(f"{task.name} {choice}") for choice in every_choice(problem, task)}
    model.add_exactly_one(chosen.values())
    start, seconds, latency = (model.new_int_var(0, program.horizon, f"{what} {task.name}") for what in "sdl")
    present: dict[tuple[DeviceMesh, ...], list[Var]] = {}
    for choice, literal in chosen.items():
        table = table_of(problem, task, choice)
        model.add(seconds == ticks(float(table.seconds[choice.option]))).only_enforce_if(literal)
        model.add(latency == ticks(float(table.latency[choice.option]))).only_enforce_if(literal)
        present.setdefault((problem.meshes[choice.mesh],), []).append(literal)
    model.add(program.period >= seconds)
    program.chosen[task.name] = chosen
    program.places[task.name] = Place(task.name, start, seconds, latency, present)


def _add_move(program: Program, move: Move) -> None:
    """A task as long as its two ends' options say; of length 0 it only orders them."""
    model, problem = program.model, program.problem
    source, target = program.places[move.source], program.places[move.target]
    name = reallocation_node(move.target)
    start, seconds = (model.new_int_var(0, program.horizon, f"{what} {name}") for what in "sd")
    present: dict[tuple[DeviceMesh, ...], list[Var]] = {}
    for left, here in program.chosen[move.source].items():
        for right, there in program.chosen[move.target].items():
            length = ticks(float(problem.move_seconds(move, left.mesh, right.mesh)[left.option, right.option]))
            model.add(seconds == length).only_enforce_if(here, there)
            if length:
                both = model.new_bool_var(f"{name} {left} {right}")
                model.add_bool_or(~here, ~there, both)
                present.setdefault((problem.meshes[left.mesh], problem.meshes[right.mesh]), []).append(both)
    model.add(start >= source.start + source.latency - move.distance * program.period)
    model.add(target.start >= start + seconds)
    model.add(program.period >= seconds)
    program.places[name] = Place(name, start, seconds, seconds, present)


def _keep_apart(program: Program, left: Place, right: Place) -> None:
    model = program.model
    turns = {k: model.new_bool_var(f"{left.name} {right.name} {k}") for k in range(-TURNS, TURNS + 2)}
    overlap = model.new_bool_var(f"{left.name} overlaps {right.name}")
    for here, some in left.present.items():
        for there, others in right.present.items():
            if any(one.overlaps(two) for one in here for two in there):
                one, other = (_any(program, literals) for literals in (some, others))
                model.add_bool_or(~one, ~other, overlap)
    model.add(sum(turns.values()) == 1).only_enforce_if(overlap)
    for k, literal in turns.items():
        model.add(right.start >= left.start + left.seconds - k * program.period).only_enforce_if(literal)
        model.add(left.start >= right.start + right.seconds - (1 - k) * program.period).only_enforce_if(literal)


def _any(program: Program, literals: list[Var]) -> Var:
    """A literal that holds where one of these does."""
    some = program.model.new_bool_var("")
    for literal in literals:
        program.model.add_implication(literal, some)
    return some


def _limit_load(program: Program) -> None:
    """Limit what a device runs to a period: follows from the rest, and helps the proof."""
    problem = program.problem
    for device in range(problem.devices):
        program.model.add(
            sum(
                ticks(float(table_of(problem, task, choice).seconds[choice.option])) * literal
                for task in problem.tasks
                for choice, literal in program.chosen[task.name].items()
                if device in problem.meshes[choice.mesh].devices
            )
            <= program.period
        )


def _limit_memory(program: Program) -> None:
    """Resident bytes of all copies, and the active bytes of each task in turn, on every device; host bytes on nodes."""
    problem, model = program.problem, program.model
    trained = {task.role for task in problem.tasks if task.trains}
    trained_copies: dict[tuple[str, int, int], list[Var]] = {}
    for task in problem.tasks:
        for choice, literal in program.chosen[task.name].items() if task.trains else ():
            layout = int(table_of(problem, task, choice).layout[choice.option])
            trained_copies.setdefault((task.role, choice.mesh, layout), []).append(literal)
    for device in range(problem.devices):
        copies: dict[tuple[object, ...], tuple[int, Var]] = {}
        running: list[tuple[int, list[Var], list[Var]]] = []
        for task in problem.tasks:
            for choice, literal in program.chosen[task.name].items():
                if device not in problem.meshes[choice.mesh].devices:
                    continue
                table = table_of(problem, task, choice)
                key = (task.role, choice.mesh, int(table.layout[choice.option]))
                in_place = [] if task.trains else trained_copies.get(key, [])
                nbytes = int(table.resident[choice.option])
                copy: tuple[object, ...] = (task.name, choice) if task.role in trained else (*key, nbytes)
                known = copies.setdefault(copy, (nbytes, model.new_bool_var("")))
                model.add_implication(literal, known[1])
                active, shared = int(table.active[choice.option]), int(table.shared[choice.option])
                running.append((active - shared, [literal], []))
                running.append((active, [literal], in_place))
        resident = sum(nbytes * literal for nbytes, literal in copies.values())
        for active, where, unless in running:
            limit = int(problem.memory[device]) - active
            model.add(resident <= limit).only_enforce_if(*where, *(~literal for literal in unless))
    for node, limit in enumerate(problem.host_memory):
        devices = range(node * problem.devices_per_node, (node + 1) * problem.devices_per_node)
        model.add(
            sum(
                int(table_of(problem, task, choice).host[choice.option])
                * sum(device in devices for device in problem.meshes[choice.mesh].devices)
                * literal
                for task in problem.tasks
                for choice, literal in program.chosen[task.name].items()
            )
            <= int(limit)
        )


def _tie(program: Program) -> None:
    for tie in program.problem.ties:
        first, *others = (program.problem.tasks[i] for i in _numbers(program, tie.tasks))
        for other in others:
            for left, here in program.chosen[first.name].items():
                fitting = [
                    there
                    for right, there in program.chosen[other.name].items()
                    if left.mesh == right.mesh
                    and (not tie.layout or _layout(program, first, left) == _layout(program, other, right))
                ]
                program.model.add_bool_or(~here, *fitting)


def _numbers(program: Program, names: tuple[str, ...]) -> list[int]:
    number = {task.name: i for i, task in enumerate(program.problem.tasks)}
    return [number[name] for name in names]


def _layout(program: Program, task: SearchTask, choice: Choice) -> int:
    return int(table_of(program.problem, task, choice).layout[choice.option])
