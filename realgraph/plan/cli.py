"""The command line of `realgraph plan`: its options and their help. Imports nothing heavy until it is called."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from realgraph.graphs.errors import ConfigError, Problem, Where

if TYPE_CHECKING:
    from realgraph.plan.options import PlanOptions

EPILOG = (
    "Exit codes: 0 a plan was found (also where Ctrl-C or the time limit ended the search); 1 the output could not be "
    "written; 2 a mistake in the run file, another file or the command line; 4 no plan fits, which is proven, or no "
    "size of --devices reaches --target; 5 the time limit ended the search before a plan was found; 130 interrupted "
    "before a plan was found."
)
MINUTE_SECONDS = 60.0


def _shown(name: str, text: str, metavar: str | None = None, least: float | None = None) -> object:
    return typer.Option(name, help=text, metavar=metavar, min=least, rich_help_panel="Output")


def _read(name: str, text: str, metavar: str | None = None) -> object:
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel="Input")


def _searched(name: str, text: str, metavar: str | None = None, least: float | None = None) -> object:
    return typer.Option(name, help=text, metavar=metavar, min=least, rich_help_panel="Search")


File = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH=VALUE]...", help="Overrides, such as staleness=4", show_default=False),
]
Json = Annotated[bool, _shown("--json", "Print the answer as JSON.")]
Out = Annotated[Path | None, _shown("--out", "Write the plan to this file as well.")]
Html = Annotated[Path | None, _shown("--html", "Write the report as one HTML page.")]
Trace = Annotated[Path | None, _shown("--trace", "Write the timeline for ui.perfetto.dev.")]
Explain = Annotated[str | None, _shown("--explain", "Show the next-best options of this call.", "CALL")]
Price = Annotated[
    float | None, _shown("--price", "Price of a device-hour; default: that of the device kind.", "USD", 0)
]
Brief = Annotated[bool, _shown("--brief", "Leave out other plans and what-if hints.")]
RunDir = Annotated[Path | None, _read("--run", "Plan with what this run measured; compare it with its plan.", "DIR")]
Edited = Annotated[Path | None, _read("--plan", "Evaluate this plan, and show the best one beside it.")]
Costs = Annotated[Path | None, _read("--costs", "Measured costs: a table, or a finished run.")]
Lengths = Annotated[Path | None, _read("--lengths", "Lengths of responses: a file, or a finished run.")]
ProblemFile = Annotated[Path | None, _read("--problem", "Solve this planning problem (JSON) instead of a run.")]
Devices = Annotated[str | None, _searched("--devices", "Plan for each of these cluster sizes.", "8..1024")]
Target = Annotated[
    float | None, _searched("--target", "With --devices: the cheapest size for this period.", "SECONDS", 0)
]
Robust = Annotated[bool, _searched("--robust", "Choose the plan that suffers least from errors of the costs.")]
Colocated = Annotated[bool, _searched("--colocated", "Place every call on all devices.")]
Exact = Annotated[bool, _searched("--exact", "The fastest plan, where a simpler one is as good but for its error bar.")]
TimeLimit = Annotated[float, _searched("--time-limit", "Time limit of the search.", "SECONDS", 0)]
Seed = Annotated[int, _searched("--seed", "Random seed of the search.", None, 0)]

PLAN = "plan"  # the command of the group that stands for it where no other is named
Before = Annotated[Path, typer.Argument(metavar="BEFORE", help="A plan file, or a run directory.", show_default=False)]
After = Annotated[Path, typer.Argument(metavar="AFTER", help="A plan file, or a run directory.", show_default=False)]


class PlanGroup(TyperGroup):
    """`realgraph plan FILE`, and commands of its own such as `realgraph plan diff A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Everything that names no command belongs to planning itself."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [PLAN, *args])


class PlanCommand(TyperCommand):
    """Planning itself: in help and errors it stands in the place of its group."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Without a word of its own in the command's path."""
        return super().make_context(parent.info_name, args, parent.parent, **extra)


app = typer.Typer(
    cls=PlanGroup, add_completion=False, help="Choose devices and a layout for every call; compare plans."
)


@app.command(name=PLAN, cls=PlanCommand, epilog=EPILOG, hidden=True)
def plan(
    file: File = None,
    overrides: Overrides = None,
    json_out: Json = False,
    out: Out = None,
    html: Html = None,
    trace: Trace = None,
    explain: Explain = None,
    price: Price = None,
    brief: Brief = False,
    run_dir: RunDir = None,
    edited: Edited = None,
    costs: Costs = None,
    lengths: Lengths = None,
    problem: ProblemFile = None,
    devices: Devices = None,
    target: Target = None,
    robust: Robust = False,
    colocated: Colocated = False,
    exact: Exact = False,
    time_limit: TimeLimit = MINUTE_SECONDS,
    seed: Seed = 0,
) -> None:
    """Choose devices and a layout for every call; show a timeline, memory, and the proven gap to the best plan.

    `realgraph plan diff A B` shows what changed from one plan file to another. Ctrl-C takes the best plan so far.
    """
    from realgraph.plan.options import PlanOptions

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
        exact=exact,
        brief=brief,
        time_limit=time_limit,
        seed=seed,
        price=price,
        costs=costs,
        lengths=lengths,
    )
    _dispatch(file, overrides or [], problem, options)


@app.command(name="diff")
def diff(before: Before, after: After, json_out: Json = False) -> None:
    """Show what changed from one plan file to another."""
    from realgraph.plan.diff import diff_command

    diff_command(before, after, json_out)


def _dispatch(file: Path | None, overrides: list[str], problem: Path | None, options: "PlanOptions") -> None:
    """One of: a planning problem, a run."""
    if problem is not None:
        from realgraph.plan.problem import problem_command

        if file is not None:
            raise _mistake("--problem takes no run file", f"leave {file} out")
        problem_command(problem, options)
    elif file is None:
        if (run := options.run_dir) is not None:
            raise _mistake("--run DIR takes a run file too", f"realgraph plan {run}/config.yaml --run {run}")
        raise _mistake("which run?", "realgraph plan FILE; realgraph init writes a run file")
    else:
        from realgraph.plan.command import plan_command

        plan_command(file, overrides, options)


def _mistake(text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where("command line"), text, hint, "plan")])
