"""`realgraph check`: every mistake of a run file or a graph file at once, but for those that a search for a plan finds.
Imports no torch and uses no network."""

from collections.abc import Sequence
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import Graph
from realgraph.graphs.yaml.document import read_document
from realgraph.graphs.yaml.load import shown_name
from realgraph.planner.report.format import counted
from realgraph.run.requests import refuse_unplannable
from realgraph.run_file.compose import Checked, check_document
from realgraph.run_file.function_variables import refuse_unset
from realgraph.run_file.open_graph import graph_and_warnings, is_graph
from realgraph.run_file.resolved import resolved_text
from realgraph.runtime.processes.environment import variables
from realgraph.screen.output import say, say_json, say_warnings


def check_command(file: Path, overrides: Sequence[str] = (), resolved: bool = False, json_out: bool = False) -> None:
    """Check, and print a summary, the resolved run file, or JSON. Raises ConfigError with all problems."""
    try:
        document = read_document(file, shown_name(file))
        if is_graph(document):
            graph, warnings = graph_and_warnings(document, overrides)
            _report_graph(file, graph, warnings, resolved, json_out)
        else:
            checked = check_document(document, file, overrides)
            refuse_unset(checked, variables())
            refuse_unplannable(checked)
            _report_run(file, checked, resolved, json_out)
    except ConfigError as error:
        if json_out:
            say_json({"ok": False, "problems": [_plain(problem) for problem in error.problems]})
        raise


def _report_run(file: Path, checked: Checked, resolved: bool, json_out: bool) -> None:
    run, graph = checked.run, checked.graph
    if json_out:
        shown = [_plain(warning) for warning in checked.warnings]
        head = {"ok": True, "problems": [], "warnings": shown, "name": checked.name}
        origins = {"resolved": resolved_text(checked.composed)} if resolved else {}
        say_json({**head, "run": run, "graph": graph, **origins})
        return
    say_warnings(checked.warnings)
    if resolved:
        say(resolved_text(checked.composed), end="")
    else:
        step = f"{counted(run.batch.groups, 'group')} x {counted(graph.samples_per_group, 'sample')} a step"
        samples = f"{step}, {counted(run.steps, 'step')}"
        say(f"{file}: ok. {_shape(graph)}; {samples}")


def _report_graph(file: Path, graph: Graph, warnings: Sequence[Problem], resolved: bool, json_out: bool) -> None:
    if resolved:
        text = "--resolved prints a run file, and this is a graph file: it has no `graph:`"
        raise ConfigError([Problem(Where(str(file)), text, "write a run file: realgraph init --graph FILE")])
    if json_out:
        shown = [_plain(warning) for warning in warnings]
        say_json({"ok": True, "problems": [], "warnings": shown, "name": graph.name, "graph": graph})
    else:
        say_warnings(warnings)
        say(f"{file}: ok, as a graph without a run. {_shape(graph)}")


def _shape(graph: Graph) -> str:
    counts = (("call", len(graph.calls)), ("model", len(graph.models)), ("key", len(graph.keys)))
    words = ", ".join(f"{n} {word}" if n == 1 else f"{n} {word}s" for word, n in counts)
    return f"Graph {graph.name}: {words}"


def _plain(problem: Problem) -> dict[str, object]:
    where = problem.where
    place = {"file": where.file, "line": where.line, "path": where.path}
    return {**place, "text": problem.text, "hint": problem.hint, "rule": problem.rule}
