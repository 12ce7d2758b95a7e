"""Makes the pictures of the README from the project's own commands: `python docs/pictures.py [RUN_DIRECTORY]`.

RUN_DIRECTORY is a finished run of the quickstart, such as quickstart-run/grpo; without it that picture stays as it is.
"""

import json
import os
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from realgraph.commands.graph import graph_command
from realgraph.plan.command import asked_for, print_plan
from realgraph.plan.costs import PlanCosts
from realgraph.plan.options import PlanOptions
from realgraph.planner.search.search import search
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.screen.summary import summarise
from realgraph.screen.terminal import Terminal

DOCS = Path(__file__).parent
PLANNED = DOCS.parent / "configs" / "ppo_llama3_8b_2x8h100.yaml"
LEARNED = DOCS.parent / "benchmarks" / "results" / "async_learning.json"
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 640, 324, 44, 20, 150  # of the picture of learning, and of its margins
# (staleness, loss, samples as old as the bound) -> colour and dashes
CURVES = {
    (0, "decoupled", False): ("#444444", ""),
    (4, "decoupled", True): ("#1f6fb4", ""),
    (8, "decoupled", True): ("#1f6fb4", "6 4"),
    (4, "naive", True): ("#c0392b", ""),
    (8, "naive", True): ("#c0392b", "6 4"),
}


def main(run: Path | None) -> None:
    """Write grpo.svg, plan.svg, staleness.svg and quickstart.svg beside this file."""
    graph_command("grpo", (), None, DOCS / "grpo.svg")
    checked = check_run(PLANNED)
    request = asked_for(checked, PlanOptions(), PlanCosts())
    console = recording(128)
    print_plan(search(request), checked, request, console)
    save(console, f"realgraph plan {PLANNED.relative_to(DOCS.parent)}", DOCS / "plan.svg")
    (DOCS / "staleness.svg").write_text("\n".join(_learning()) + "\n", encoding="utf-8")
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


def _learning() -> Iterator[str]:
    """Lines of the picture of `benchmarks/async_learning.py`: held-out accuracy by steps, means over the seeds."""
    recorded = json.loads(LEARNED.read_text())
    right, bottom = WIDTH - RIGHT, HEIGHT - 34

    def at(step: float, accuracy: float) -> tuple[float, float]:
        return LEFT + step / recorded["steps"] * (right - LEFT), bottom - accuracy * (bottom - TOP)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    yield 'font-family="sans-serif" font-size="12">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, tick)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="{LEFT + 6}" y="{TOP - 3}">held-out accuracy</text>'
    labels: list[float] = []
    for (staleness, loss, forced), (colour, dashes) in CURVES.items():
        runs = [row["curve"] for row in recorded["rows"] if row["case"][1:] == [staleness, loss, forced]]
        means = [(points[0][0], statistics.fmean(one for _, one in points)) for points in zip(*runs, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in means))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        label = at(*means[-1])[1] + 4
        while any(abs(label - other) < 14 for other in labels):
            label += 1
        labels.append(label)
        text = f"{loss}, {staleness} steps late" if staleness else "synchronous"
        yield f'<text x="{right + 6}" y="{label:.1f}" fill="{colour}">{text}</text>'
    for step, _ in means:
        yield f'<text x="{at(step, 0)[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{step}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 4}" text-anchor="middle">steps</text>'
    yield "</svg>"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
