"""`realgraph plan diff A B`: what changed from one plan file, or plan of a run directory, to another."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.graphs.yaml.files import read_text
from realgraph.planner.plan.codec import plan_from_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.report.diff import PlanChange, diff
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.screen.output import say_json
from realgraph.screen.terminal import wide_terminal


def diff_command(before: Path, after: Path, json_out: bool = False) -> tuple[PlanChange, ...]:
    """Print every change as a table or JSON. Raises ConfigError where a file is no plan."""
    changes = diff(_read(before), _read(after))
    if json_out:
        say_json(changes)
    elif changes:
        names = (before.name, after.name) if before.name != after.name else (str(before), str(after))
        wide_terminal().print(table(changes, *names))
    else:
        wide_terminal().print("no difference: the two plans predict and do the same")
    return changes


def table(changes: tuple[PlanChange, ...], before: str, after: str) -> Table:
    """A row per change, the calls' names once each."""
    shown = Table("", "what", before, after, "change", box=None, pad_edge=False, header_style="bold")
    last = None
    for change in changes:
        subject = change.subject or "plan"
        shown.add_row(
            Text(subject if subject != last else "", style="bold"),
            change.what,
            change.before,
            change.after,
            change.change,
        )
        last = subject
    return shown


def _read(path: Path) -> Plan:
    file = RunFolder(path).plan if path.is_dir() else path
    try:
        return plan_from_json(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [
                Problem(
                    Where(str(file)),
                    f"the plan can't be read: {reason(error)}",
                    "a plan is what `realgraph plan --out FILE` writes, or a run directory's",
                    "plan",
                )
            ]
        ) from error
