"""Makes the pictures of the README from the project's own commands: `python docs/pictures.py RUN_DIRECTORY`.

RUN_DIRECTORY is a finished run of the quickstart, such as quickstart-run/grpo.
"""

import re
import sys
from pathlib import Path

from rich.console import Console

from realgraph.graph_command import graph_command
from realgraph.runtime.run_folder import RunFolder
from realgraph.summary import summarise

DOCS = Path(__file__).parent


def main(run: Path) -> None:
    """Write grpo.svg and quickstart.svg beside this file."""
    graph_command("grpo", (), None, DOCS / "grpo.svg")
    console = Console(record=True, width=88, file=open("/dev/null", "w"))  # noqa: SIM115
    summarise(RunFolder(run), console)
    picture = console.export_svg(title="make quickstart")
    plain = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # it shall not fetch fonts from the web
    (DOCS / "quickstart.svg").write_text(plain, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
