"""Makes the pictures of the README from the project's own commands: `python docs/pictures.py [RUN_DIRECTORY]`.

RUN_DIRECTORY is a finished run of the quickstart, such as quickstart-run/grpo; without it that picture stays as it is.
"""

import os
import re
import sys
from pathlib import Path

from realgraph.commands.graph import graph_command
from realgraph.plan.command import asked_for, print_plan
from realgraph.plan.options import PlanOptions
from realgraph.planner.search.search import search
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.screen.summary import summarise
from realgraph.screen.terminal import Terminal

DOCS = Path(__file__).parent
PLANNED = DOCS.parent / "configs" / "ppo_llama3_8b_2x8h100.yaml"


def main(run: Path | None) -> None:
    """Write grpo.svg, plan.svg and quickstart.svg beside this file."""
    graph_command("grpo", (), None, DOCS / "grpo.svg")
    checked = check_run(PLANNED)
    request = asked_for(checked, PlanOptions())
    console = recording(128)
    print_plan(search(request), checked, request, console)
    save(console, f"realgraph plan {PLANNED.relative_to(DOCS.parent)}", DOCS / "plan.svg")
    if run is not None:
        console = recording(88)
        summarise(RunFolder(run), console)
        save(console, "make quickstart", DOCS / "quickstart.svg")


def recording(width: int) -> Terminal:
    """A console that shows nothing and remembers all."""
    return Terminal(record=True, width=width, file=open(os.devnull, "w"))


def save(console: Terminal, title: str, file: Path) -> None:
    """Write what was printed as an SVG picture that fetches no fonts from the web."""
    picture = console.export_svg(title=title)
    file.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
