"""`realgraph plan`: from a run file to a report in the terminal, a page, a trace, or JSON. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.plan.beside import (
    BESIDE_SECONDS,
    cut_short,
    hints_of,
    other_plans,
    rules,
    simpler,
    simplified_text,
    synchrony,
)
from realgraph.plan.costs import PlanCosts, costs_for
from realgraph.plan.explain import explained, refuse_free
from realgraph.plan.lengths import read_lengths
from realgraph.plan.options import PlanOptions, refuse_conflicts, sizes_of
from realgraph.plan.session import Budget, Session, session
from realgraph.plan.sweep import sweep_json, swept, unreached
from realgraph.plan.view.facts import doubts_of, facts_of, fresher
from realgraph.plan.view.measured import measured_calls, read_run
from realgraph.plan.view.table import beside_parts, explain_parts, plan_parts
from realgraph.planner.advise.robust import robust
from realgraph.planner.advise.servers import with_servers
from realgraph.planner.options.tables import PreparedProblem, problem_of
from realgraph.planner.plan.codec import plan_to_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.content import Findings, MeasuredSeconds, PlannedSize, Report, report_of
from realgraph.planner.report.html import page
from realgraph.planner.report.price import price_of
from realgraph.planner.report.text import cheapest
from realgraph.planner.report.trace import trace_json
from realgraph.planner.request.request import PlanRequest, kept_by
from realgraph.planner.search.assembly import plan_of
from realgraph.planner.search.search import solved
from realgraph.planner.search.simpler import simplest
from realgraph.run.plan_warnings import departed
from realgraph.run.planning import read_plan
from realgraph.run.requests import RequestOptions, request_for
from realgraph.run_file.compose import Checked, check_run
from realgraph.screen.files import PAGE, PLAN, TRACE, refuse_unwritable, write
from realgraph.screen.output import say_json, say_json_text, say_warnings
from realgraph.screen.terminal import Terminal, wide_terminal


class Made(Struct, frozen=True):
    """The plan to show and what it was made for; `sizes` where several clusters were planned for."""

    request: PlanRequest
    plan: Plan
    prepared: PreparedProblem | None = None
    costs: PlanCosts = PlanCosts()
    notes: tuple[str, ...] = ()
    sizes: tuple[PlannedSize, ...] = ()


def plan_command(file: Path, overrides: Sequence[str] = (), options: PlanOptions = PlanOptions()) -> Plan:
    """Plan the run in `file` and show the plan as the options ask. Raises ConfigError with every problem."""
    refuse_conflicts(options)
    for out, kind in ((options.out, PLAN), (options.html, PAGE), (options.trace, TRACE)):
        refuse_unwritable(out, kind)
    checked = check_run(file, overrides, weights=False)
    say_warnings(checked.warnings)
    costs = costs_for(options)
    request = asked_for(checked, options, costs)
    if options.explain is not None:
        refuse_free(request, options.explain)
    measured = measured_calls(read_run(options.run_dir)) if options.run_dir is not None else ()
    with session(options, checked) as now:
        made = replace(now.find(lambda: _made(now, request, options)), costs=costs)
        now.progress.close()
        if options.edited is not None:
            say_warnings(departed(checked, made.plan, made.request))
        if options.out is not None:
            write(options.out, plan_to_json(made.plan))
        report = _report(checked, made, options, measured)
        if options.explain is not None:
            _explain(report, made, options)
        elif options.json_out:
            say_json_text(sweep_json(made.sizes, options.target) if made.sizes else plan_to_json(made.plan))
        else:
            report = _print_report(now, report, made, options)
        if options.trace is not None:
            write(options.trace, trace_json(report))
        if options.html is not None:
            write(options.html, page(report))
    if options.target is not None and made.sizes and cheapest(made.sizes, options.target) is None:
        raise unreached(made.sizes, options.target)
    return made.plan


def asked_for(checked: Checked, options: PlanOptions, costs: PlanCosts) -> PlanRequest:
    """The request that is planned for, with what the options change. Raises ConfigError."""
    lengths = read_lengths(options.lengths) if options.lengths is not None else ()
    request = request_for(checked, asked=RequestOptions(costs.table, lengths, costs.source, costs.option))
    if options.colocated:
        request = replace(request, constraints=replace(request.constraints, colocated=True))
    return request


def _made(now: Session, request: PlanRequest, options: PlanOptions) -> Made:
    """The plan, by the way that the options ask for. Raises ConfigError."""
    if options.devices is not None:
        sizes = sizes_of(options.devices, request.cluster.devices_per_node)
        sweep = swept(now, request, sizes, options.target)
        first = f"sizes are of {request.cluster.kind} alone, the first kind of the mixed cluster"
        return Made(sweep.request, sweep.plan, notes=(first,) if request.cluster.more else (), sizes=sweep.sizes)
    if options.edited is not None:
        return Made(request, read_plan(options.edited, request))
    placed = with_servers(request, now.limits)
    request, notes = placed.request, (placed.text,) if placed.text else ()
    if options.robust:
        steady = robust(request, now.limits)
        return Made(request, steady.plan, notes=(steady.text, *notes))
    prepared, solution = solved(request, now.limits)
    whole = len(prepared.problem.meshes) == 1  # as a rule's own plan has it: other rules have other meshes
    plan = plan_of(prepared, solution)
    if not options.exact:
        plan = simplest(request, plan, now.limits)
    return Made(request, plan, None if whole else prepared, notes=notes)


# --- showing it -------------------------------------------------------------------------------------------------------


def print_plan(plan: Plan, checked: Checked, request: PlanRequest, console: Terminal) -> None:
    """The plan of a run that starts: everything that needs no further search."""
    show(_report(checked, Made(request, plan), PlanOptions()), console)


def show(report: Report, console: Terminal) -> None:
    """All parts, one under the other."""
    for part in (*plan_parts(report, console.width), *beside_parts(report)):
        console.print(part)


def _print_report(now: Session, report: Report, made: Made, options: PlanOptions) -> Report:
    """The plan at once, then what is searched beside it; returns the whole report."""
    out = wide_terminal()
    for part in plan_parts(report, out.width):
        out.print(part)
    if not (options.brief or now.stop()):
        report = _with_beside(now, report, made, options)
        now.progress.close()
    for part in beside_parts(report):
        out.print(part)
    return report


def _with_beside(now: Session, report: Report, made: Made, options: PlanOptions) -> Report:
    """The report with other plans, hints, and a word on synchrony, as far as time and patience last."""
    budget = Budget(BESIDE_SECONDS)
    now.progress.show("planning what stands beside it (Ctrl-C leaves it out)")
    comparisons = (
        *rules(now, made.prepared or problem_of(kept_by(made.request, made.plan))),
        *other_plans(now, made.request, options.edited is not None),
    )
    hints, missing = hints_of(now, made.request, made.plan, budget)
    word = synchrony(now, made.request, made.plan)
    words = (cut_short(made.plan, comparisons), word, simpler(made.request, made.plan, comparisons), missing)
    notes = (*report.findings.notes, *filter(None, words))
    return replace(report, findings=replace(report.findings, comparisons=comparisons, hints=hints, notes=notes))


def _explain(report: Report, made: Made, options: PlanOptions) -> None:
    assert options.explain is not None
    alternatives = explained(made.request, made.plan, options.explain)
    if options.json_out:
        say_json(alternatives)
        return
    out = wide_terminal()
    for part in explain_parts(report, options.explain, alternatives):
        out.print(part)


def _report(checked: Checked, made: Made, options: PlanOptions, measured: tuple[MeasuredSeconds, ...] = ()) -> Report:
    findings = Findings(
        doubts=tuple(doubts_of(checked, made.request, made.plan)),
        notes=(*made.notes, *simplified_text(made.plan), *fresher(made.request, made.plan)),
        price=price_of(made.request.cluster, made.plan.period_seconds, checked.run.steps, options.price),
        sweep=made.sizes,
        target_seconds=options.target,
        measured=measured,
    )
    facts = (*facts_of(checked, made.request), *((("costs", made.costs.text),) if made.costs.text else ()))
    return report_of(made.request, made.plan, checked.name, facts, findings)
