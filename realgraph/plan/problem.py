"""`realgraph plan --problem FILE`: the search on a planning problem given as data."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.yaml.files import read_file
from realgraph.plan.options import PlanOptions, refuse_others
from realgraph.plan.session import INTERRUPTED, NOT_FOUND, NoPlanYet, session
from realgraph.plan.view.gantt import gantt
from realgraph.plan.view.table import titled
from realgraph.planner.feasibility.shortage import shortage
from realgraph.planner.plan.plan import reallocation_node
from realgraph.planner.plan.problem import Limits, Solution, Unsolved
from realgraph.planner.problem_file.codec import FileProblem, ProblemAnswer, answer_of, read_problem, solution_json
from realgraph.planner.report.format import devices_text, gap_text, percent_text, seconds_text
from realgraph.planner.report.schedule import DrawnTask, Kind, timeline
from realgraph.planner.report.text import STOPPED
from realgraph.planner.solve.solver import orders, solve
from realgraph.screen.files import SOLUTION, refuse_unwritable, write
from realgraph.screen.first_search import prepare_search
from realgraph.screen.output import say_json_text
from realgraph.screen.terminal import Terminal, wide_terminal


class NoPlan(ConfigError):
    """Proven: no choice of options fits the memory."""

    exit_code = 4


def problem_command(file: Path, options: PlanOptions) -> Solution:
    """Solve and print the answer. Raises ConfigError for a wrong file, NoPlan (4) and NoPlanYet (5 or 130)."""
    refuse_others(options, ("json_out", "out", "time_limit", "seed"), "--problem")
    refuse_unwritable(options.out, SOLUTION)
    read = read_problem(_bytes(file), str(file))
    prepare_search()
    with session(options) as now:
        result = solve(read.problem, now.limits)
        interrupted = now.stop()
    turns = orders(read.problem, result) if isinstance(result, Solution) else {}
    text = solution_json(read, result, turns)
    if options.out is not None:
        write(options.out, text)
    if options.json_out:
        say_json_text(text)
    if isinstance(result, Unsolved):
        raise _unsolved(read, result, file, interrupted)
    if not options.json_out:
        answer = answer_of(read, result, turns)
        assert isinstance(answer, ProblemAnswer)
        show(read, answer, result, wide_terminal())
    return result


def show(read: FileProblem, answer: ProblemAnswer, solution: Solution, out: Terminal) -> None:
    """Period and bound, the choices, and two periods."""
    for part in _parts(read, answer, solution):
        out.print(part)


def _parts(read: FileProblem, answer: ProblemAnswer, solution: Solution) -> Iterator[RenderableType]:
    problem = read.problem
    size = f"{len(problem.tasks)} calls, {problem.devices:,} devices"
    yield Text.assemble((f"{answer.name or 'problem'}: ", "bold"), size)
    yield Text.assemble(("period ", "bold"), seconds_text(solution.period))
    why = f"searched for {seconds_text(solution.seconds)} until {STOPPED[solution.stopped]}; within: {answer.scope}"
    yield Text.assemble(
        ("lower bound ", "bold"), f"{seconds_text(solution.bound)}, gap {gap_text(solution.gap)}, {why}"
    )
    yield Text()
    yield _choices(answer)
    yield from gantt(timeline(_tasks(read, answer), solution.period, solution.critical, problem.devices))
    if solution.critical:
        yield Text.assemble(("\ncritical circuit ", "bold"), " -> ".join((*solution.critical, solution.critical[0])))


def _choices(answer: ProblemAnswer) -> Table:
    table = titled("choices")
    for name in ("call", "option", "devices", "dp/tp/pp", "seconds", "share", "note"):
        table.add_column(name, justify="right" if name in ("option", "seconds", "share") else "left")
    for name, choice in answer.choices.items():
        axes = "/".join(str(ranks or "-") for ranks in (choice.dp, choice.tp, choice.pp))
        table.add_row(
            Text(name, style="bold" if name in answer.critical else ""),
            str(choice.option),
            devices_text(range(choice.mesh[0], sum(choice.mesh))),
            axes if axes != "-/-/-" else "",
            seconds_text(choice.seconds),
            percent_text(choice.seconds / answer.period) if answer.period > 0 else "",
            choice.note,
        )
    return table


def _tasks(read: FileProblem, answer: ProblemAnswer) -> tuple[DrawnTask, ...]:
    """Calls and reallocations with what they hold. A file does not say what generates: that counts as inference."""
    tasks: list[DrawnTask] = []
    devices = {name: range(choice.mesh[0], sum(choice.mesh)) for name, choice in answer.choices.items()}
    sources = {move.target: move.source for move in read.problem.moves}
    for task in read.problem.tasks:
        moved = reallocation_node(task.name)
        if moved in answer.starts:
            both = frozenset(devices[task.name]) | frozenset(devices[sources[task.name]])
            seconds = answer.reallocation_seconds[task.name]
            tasks.append(DrawnTask(moved, "reallocate", seconds, answer.starts[moved], both))
        seconds = answer.choices[task.name].seconds
        kind: Kind = "train" if task.trains else "inference"
        tasks.append(DrawnTask(task.name, kind, seconds, answer.starts[task.name], frozenset(devices[task.name])))
    return tuple(tasks)


def _unsolved(read: FileProblem, unsolved: Unsolved, file: Path, interrupted: bool) -> ConfigError:
    if unsolved.proven:
        return NoPlan([_misfit(read, unsolved, file)])
    text = f"no plan was found in {seconds_text(unsolved.seconds)}: {unsolved.reason}"
    problem = Problem(Where(str(file)), text, "raise --time-limit", "search")
    return NoPlanYet((problem,), INTERRUPTED if interrupted else NOT_FOUND)


def _misfit(read: FileProblem, unsolved: Unsolved, file: Path) -> Problem:
    """An error that names the calls that do not fit, and what they lack."""
    lack = shortage(read.problem, Limits())
    if lack is None:
        return Problem(Where(str(file)), f"no plan fits: {unsolved.reason}", "", "memory")
    names = [call.name for call in read.spec.calls]
    place = Where(str(file), path=f"$.calls[{names.index(lack.calls[0])}]")
    hints = {
        "memory": "raise `memory`, or give these calls options that need less",
        "host_memory": "raise `host_memory`, or give these calls options that need less of it",
        "places": "give tied calls options on one mesh, or leave the tie out",
    }
    return Problem(place, f"no plan fits: {lack.text}", hints[lack.what], "memory")


def _bytes(file: Path) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise ConfigError([Problem(Where(str(file)), f"can't be read: {error.strerror}", "", "problem")]) from error
