"""`realgraph plan`: from a run file to a report in the terminal, a page, a trace, or JSON. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from realgraph.compose import Checked, check_run
from realgraph.plan_console import console, write
from realgraph.plan_facts import doubts_of, facts_of
from realgraph.plan_options import PlanOptions
from realgraph.plan_table import beside_parts, plan_parts
from realgraph.planner.codec import plan_to_json
from realgraph.planner.plan import Plan
from realgraph.planner.report import Findings, Report, report_of
from realgraph.planner.report_html import page
from realgraph.planner.report_trace import trace_json
from realgraph.planner.request import PlanRequest
from realgraph.planning import plan_for, read_plan, request_for


def plan_command(file: Path, overrides: Sequence[str] = (), options: PlanOptions = PlanOptions()) -> Plan:
    """Plan the run in `file` and show the plan as the options ask. Raises ConfigError with every problem."""
    checked = check_run(file, overrides)
    request = request_for(checked)
    plan = plan_for(checked, request) if options.edited is None else read_plan(options.edited, request)
    text = plan_to_json(plan)
    if options.out is not None:
        write(options.out, text)
    if options.json_out:
        print(text, end="")
        return plan
    report = _report(checked, request, plan)
    if options.trace is not None:
        write(options.trace, trace_json(report))
    if options.html is not None:
        write(options.html, page(report))
    show(report, console())
    return plan


def print_plan(plan: Plan, checked: Checked, request: PlanRequest, console: Console) -> None:
    """The plan of a run that starts: everything that needs no further search."""
    show(_report(checked, request, plan), console)


def show(report: Report, console: Console) -> None:
    """All parts, one under the other."""
    for part in (*plan_parts(report, console.width), *beside_parts(report)):
        console.print(part)


def _report(checked: Checked, request: PlanRequest, plan: Plan) -> Report:
    findings = Findings(doubts=tuple(doubts_of(checked, request)))
    return report_of(request, plan, checked.name, facts_of(checked, request), findings)
