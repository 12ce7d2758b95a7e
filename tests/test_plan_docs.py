"""docs/planning.md names every option and exit code of `realgraph plan`, and no option that there is not."""

import re
from pathlib import Path

from typer.main import get_command

from realgraph.cli import app
from realgraph.plan.cli import EPILOG

TEXT = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()


def test_every_option_is_documented_and_none_is_made_up() -> None:
    group = get_command(app).commands["plan"]  # type: ignore[attr-defined]
    command = group.commands["plan"]
    declared = {name for option in command.params for name in option.opts if name.startswith("--")}
    rows = {
        name for row in re.findall(r"^\| (`--.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"--[a-z-]+", row)
    }
    assert rows == declared


def test_every_exit_code_is_documented() -> None:
    table = TEXT[TEXT.index("## Exit codes") :]
    codes = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert codes == ["0", "1", "2", "4", "5", "130"]
    assert all(re.search(rf"\b{code}\b", EPILOG) for code in codes)
