"""The command line of `realgraph plan`: its options and their help. Imports nothing heavy until it is called."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from realgraph.graphs.errors import ConfigError, Problem, Where

if TYPE_CHECKING:
    from realgraph.plan_options import PlanOptions

OUTPUT, SEARCH, ABOUT = "What is shown", "How it searches", "What it reads"

EPILOG = (
    "Exit codes: 0 a plan was found (also where Ctrl-C or the time limit ended the search); 1 the reader of the output "
    "went away; 2 a mistake in the run file, a file or the command line; 4 proven: no plan fits, or no size of "
    "--devices reaches --target; 5 the time limit ended the search before a plan was found; 130 interrupted before one."
)


def plan(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE | diff A B]", help="Run file.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH=VALUE]...", help="Overrides, such as staleness=4", show_default=False),
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.", rich_help_panel=OUTPUT)] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the plan to this file as well.", rich_help_panel=OUTPUT)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that needs no network.", rich_help_panel=OUTPUT)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the timeline for ui.perfetto.dev.", rich_help_panel=OUTPUT)
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="CALL", help="The call's next-best options.", rich_help_panel=OUTPUT),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            metavar="USD",
            min=0,
            help="Of one device for an hour; default: its kind's.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Leave out other plans and what-if hints.", rich_help_panel=OUTPUT)
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Compare with what this run measured.", rich_help_panel=ABOUT),
    ] = None,
    edited: Annotated[
        Path | None,
        typer.Option("--plan", help="Judge this plan, and show the best beside it.", rich_help_panel=ABOUT),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Measured costs: a table, or a finished run.", rich_help_panel=ABOUT),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option("--lengths", help="Lengths of responses: a file, or a finished run.", rich_help_panel=ABOUT),
    ] = None,
    problem: Annotated[
        Path | None,
        typer.Option("--problem", help="Solve this bare problem (JSON) instead of a run.", rich_help_panel=ABOUT),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="8..1024", help="Plan for each of these cluster sizes.", rich_help_panel=SEARCH
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            metavar="SECONDS",
            min=0,
            help="With --devices: the cheapest size for this period.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    robust: Annotated[
        bool,
        typer.Option("--robust", help="Choose the plan that errors of the costs hurt least.", rich_help_panel=SEARCH),
    ] = False,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Every call on all devices.", rich_help_panel=SEARCH)
    ] = False,
    engine: Annotated[
        Literal["installed", "any"] | None,
        typer.Option(
            "--engine", help="Layouts that this version runs, or all; default: any on GPUs.", rich_help_panel=SEARCH
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", min=0, help="Of the search.", rich_help_panel=SEARCH)
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.", rich_help_panel=SEARCH)] = 0,
) -> None:
    """Choose what runs where: a table of allocations, a timeline, memory, and the proven distance from the best plan.

    `realgraph plan diff A B` says what changed from one plan file to another. Ctrl-C takes the best plan so far.
    """
    from realgraph.plan_options import PlanOptions

    options = PlanOptions(
        json_out=json_out,
        out=out,
        edited=edited,
        explain=explain,
        html=html,
        trace=trace,
        run_dir=run_dir,
        devices=devices,
        target=target,
        robust=robust,
        colocated=colocated,
        brief=brief,
        time_limit=time_limit,
        seed=seed,
        price=price,
        costs=costs,
        engine=engine,
        lengths=lengths,
    )
    _dispatch(file, overrides or [], problem, options)


def _dispatch(file: Path | None, overrides: list[str], problem: Path | None, options: "PlanOptions") -> None:
    """One of: the difference of two plans, a bare problem, a run."""
    if file is not None and file == Path("diff") and not file.is_file():
        from realgraph.plan_diff import diff_command

        if len(overrides) != 2:
            raise _mistake("`plan diff` compares two plan files", "realgraph plan diff A.json B.json")
        diff_command(Path(overrides[0]), Path(overrides[1]), options.json_out)
    elif problem is not None:
        from realgraph.plan_problem import problem_command

        problem_command(problem, options)
    elif file is None:
        raise _mistake("which run?", "realgraph plan FILE; realgraph init writes a run file")
    else:
        from realgraph.plan_command import plan_command

        plan_command(file, overrides, options)


def _mistake(text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where("command line"), text, hint, "plan")])
