"""`realgraph plan diff A B`: what changed from one plan file to another."""

from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.plan_console import console
from realgraph.planner.codec import plan_from_json
from realgraph.planner.plan import Plan
from realgraph.planner.report.diff import Change, diff


def diff_command(before: Path, after: Path, json_out: bool = False) -> tuple[Change, ...]:
    """Print every change as a table or JSON. Raises ConfigError where a file is no plan."""
    changes = diff(_read(before), _read(after))
    if json_out:
        print(msgspec.json.format(msgspec.json.encode(changes), indent=2).decode())
    elif changes:
        names = (before.name, after.name) if before.name != after.name else (str(before), str(after))
        console().print(table(changes, *names))
    else:
        console().print("no difference: the two plans predict and do the same")
    return changes


def table(changes: tuple[Change, ...], before: str, after: str) -> Table:
    """A row per change, the calls' names once each."""
    shown = Table("", "what", escape(before), escape(after), "change", box=None, pad_edge=False, header_style="bold")
    last = None
    for change in changes:
        subject = change.subject or "plan"
        shown.add_row(
            f"[bold]{escape(subject)}[/]" if subject != last else "",
            change.what,
            escape(change.before),
            escape(change.after),
            change.change,
        )
        last = subject
    return shown


def _read(file: Path) -> Plan:
    try:
        return plan_from_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [
                Problem(
                    Where(str(file)),
                    f"the plan can't be read: {reason(error)}",
                    "a plan is what `realgraph plan --out FILE` writes",
                    "plan",
                )
            ]
        ) from error
