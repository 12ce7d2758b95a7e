"""Files that a command is asked to write: nothing is replaced but what is of the same kind."""

import json
from pathlib import Path

import pytest

from realgraph.commands.graph import graph_command
from realgraph.graphs.errors import ConfigError
from realgraph.plan.command import plan_command
from realgraph.plan.options import PlanOptions
from realgraph.reference.reference import schema_command
from realgraph.report.command import report_command
from realgraph.screen import files
from realgraph.screen.files import Kind, refuse_unwritable


@pytest.mark.parametrize(
    ("kind", "known", "other"),
    [
        (files.PLAN, '{"orders": {}, "allocations": {}}', '{"factors": {}, "phases": {}}'),
        (files.SOLUTION, '{"feasible": false, "scope": ""}', '{"calls": [], "format": 1}'),
        (files.COSTS, '{"factors": null, "phases": {}}', "graph: grpo\n"),
        (files.TRACE, '{"traceEvents": []}', "[]"),
        (files.PAGE, "<!doctype HTML>\n<html>", "{}"),
        (files.SVG, '<?xml version="1.0"?>\n<svg xmlns="">', "<!DOCTYPE html>"),
        (files.MERMAID, "flowchart LR\n", "flowcharts are fine\n"),
        (files.SCHEMA, '{"$schema": "x"}', '{"prompt": "a", "answer": "b"}\n' * 2),
    ],
)
def test_a_file_is_replaced_by_its_own_kind_alone(tmp_path: Path, kind: Kind, known: str, other: str) -> None:
    out = tmp_path / "out"
    refuse_unwritable(out, kind)  # nothing is there
    for text in ("", known):
        out.write_text(text)
        refuse_unwritable(out, kind)
    out.write_text(other)
    with pytest.raises(ConfigError, match=f"exists already, and is not {kind.name}") as raised:
        refuse_unwritable(out, kind)
    assert raised.value.problems[0].where.file == str(out)
    out.write_bytes(b"\xff\xfe" + b"[" * 100_000)
    with pytest.raises(ConfigError, match="exists already"):
        refuse_unwritable(out, kind)


def test_no_option_replaces_a_run_file_or_data(tmp_path: Path) -> None:
    """They are refused before anything else is looked at, even a run file that is wrong."""
    run = tmp_path / "run.yaml"
    run.write_text("no: run file\n")
    for options in (PlanOptions(out=run), PlanOptions(html=run), PlanOptions(trace=run)):
        with pytest.raises(ConfigError, match="exists already"):
            plan_command(run, (), options)
        assert run.read_text() == "no: run file\n"
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a"}))
    with pytest.raises(ConfigError, match="not an HTML page"):
        report_command(tmp_path, data)
    with pytest.raises(ConfigError, match="not an SVG picture"):
        graph_command("grpo", svg_file=data)
    assert json.loads(data.read_text()) == {"prompt": "a"}
    (tmp_path / "reference.md").write_text("# My notes\n")
    with pytest.raises(ConfigError, match=r"reference\.md.*not a YAML reference"):
        schema_command(tmp_path)
    assert not (tmp_path / "realgraph.schema.json").exists()
