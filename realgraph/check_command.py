"""`realgraph check`: every mistake of a run file or a graph file at once. Imports no torch and uses no network."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from realgraph.compose import Checked, check_run
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import Graph
from realgraph.open_graph import graph_alone, is_graph_file
from realgraph.planner.report.format import counted
from realgraph.resolved import resolved_text


def check_command(file: Path, overrides: Sequence[str] = (), resolved: bool = False, json_out: bool = False) -> None:
    """Check, and print a summary, the resolved run file, or JSON. Raises ConfigError with all problems."""
    try:
        if is_graph_file(file):
            _report_graph(file, graph_alone(file, overrides), resolved, json_out)
        else:
            _report_run(file, check_run(file, overrides), resolved, json_out)
    except ConfigError as error:
        if json_out:
            _write_json({"ok": False, "problems": [_plain(problem) for problem in error.problems]})
        raise


def _report_run(file: Path, checked: Checked, resolved: bool, json_out: bool) -> None:
    run, graph = checked.run, checked.graph
    if json_out:
        _write_json({"ok": True, "problems": [], "name": checked.name, "run": run, "graph": graph})
    elif resolved:
        sys.stdout.write(resolved_text(checked.composed))
    else:
        step = f"{counted(run.batch.groups, 'group')} x {counted(graph.samples_per_group, 'sample')} a step"
        samples = f"{step}, {counted(run.steps, 'step')}"
        print(f"{file}: ok. {_shape(graph)}; {samples}")


def _report_graph(file: Path, graph: Graph, resolved: bool, json_out: bool) -> None:
    if resolved:
        text = "--resolved prints a run file, and this is a graph file: it has no `graph:`"
        raise ConfigError([Problem(Where(str(file)), text, "write a run file: realgraph init --graph FILE")])
    if json_out:
        _write_json({"ok": True, "problems": [], "name": graph.name, "graph": graph})
    else:
        print(f"{file}: ok, as a graph without a run. {_shape(graph)}")


def _shape(graph: Graph) -> str:
    counts = (("call", len(graph.calls)), ("model", len(graph.models)), ("key", len(graph.keys)))
    words = ", ".join(f"{n} {word}" if n == 1 else f"{n} {word}s" for word, n in counts)
    return f"Graph {graph.name}: {words}"


def _plain(problem: Problem) -> dict[str, object]:
    where = problem.where
    place = {"file": where.file, "line": where.line, "path": where.path}
    return {**place, "text": problem.text, "hint": problem.hint, "rule": problem.rule}


def _write_json(report: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
