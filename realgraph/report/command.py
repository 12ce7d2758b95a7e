"""`realgraph report`: writes the page of a run. Disturbs nothing: a run may be under way."""

from pathlib import Path

from realgraph.report.history import read_history
from realgraph.report.page import page
from realgraph.screen.files import PAGE, refuse_unwritable, write
from realgraph.screen.output import say

PAGE_FILE = "report.html"  # in the run's directory


def report_command(root: Path, out: Path | None = None) -> Path:
    """Returns the file that it has written. Raises ConfigError."""
    refuse_unwritable(out, PAGE)
    history = read_history(root)
    file = out or history.folder.root / PAGE_FILE
    write(file, page(history))
    say(f"report: {file}")
    return file
