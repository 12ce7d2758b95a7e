"""The results of a finished run and where its time went, read from its run directory."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.observer import EvalRecord, RunRecord, StepRecord, Transcript
from realgraph.screen.terminal import Terminal

SHOWN_PROBLEMS = 6
SMOOTHED_STEPS = 5


def summarise(folder: RunFolder, console: Terminal) -> None:
    """Before and after on held-out problems, some of them in full, the workers' time, and what to try next."""
    records = list(read_records(folder))
    evals = [record for record in records if isinstance(record, EvalRecord)]
    steps = [record for record in records if isinstance(record, StepRecord)]
    if evals:
        console.print(_scores(evals[0], evals[-1], steps))
        console.print(_problems(folder, evals[0].step, evals[-1].step))
    console.print(_times(folder))
    here = Path.cwd()
    root = folder.root.relative_to(here) if folder.root.is_relative_to(here) else folder.root
    console.print(f"run directory: {root}")
    console.print(f"try it:        realgraph generate {root} '12+34='")
    console.print(f"trace:         {RunFolder(root).trace}  (open it in https://ui.perfetto.dev)")


def read_records(folder: RunFolder) -> Iterator[RunRecord]:
    """The records of metrics.jsonl, in order."""
    decode = msgspec.json.Decoder(RunRecord).decode
    with folder.metrics.open("rb") as lines:
        for line in lines:
            yield decode(line)


def _scores(first: EvalRecord, last: EvalRecord, steps: list[StepRecord]) -> Table:
    table = Table("held-out problems", "before", "after", title="what it learned", title_justify="left")
    names = {"accuracy": "right, greedy"}
    for name in sorted(first.metrics.keys() & last.metrics.keys()):
        if name == "accuracy" or name.startswith("pass@"):
            table.add_row(names.get(name, name), f"{first.metrics[name]:.3f}", f"{last.metrics[name]:.3f}")
    rewards = [record.metrics["reward/reward"] for record in steps if "reward/reward" in record.metrics]
    if rewards:
        head, tail = rewards[:SMOOTHED_STEPS], rewards[-SMOOTHED_STEPS:]
        means = [f"{sum(part) / len(part):.3f}" for part in (head, tail)]
        table.add_row("reward, sampled in training", *means)
    return table


def _problems(folder: RunFolder, before: int, after: int) -> Table:
    """The same held-out problems at two evaluations."""
    texts: dict[int, list[str]] = defaultdict(list)
    with folder.transcripts.open("rb") as lines:
        for line in lines:
            record = msgspec.json.decode(line, type=RunRecord)
            if isinstance(record, Transcript) and record.split == "eval":
                texts[record.step].append(record.text)
    table = Table("before", "after", title="some of them, with their score", title_justify="left")
    # workers report in any order; sorted, the same prompts stand side by side
    for row in list(zip(sorted(texts[before]), sorted(texts[after]), strict=False))[:SHOWN_PROBLEMS]:
        table.add_row(*row)
    return table


def _times(folder: RunFolder) -> Table:
    """Busy seconds of the workers by call, from the trace."""
    seconds: dict[str, float] = defaultdict(float)
    with folder.trace.open("rb") as lines:
        for line in lines:  # one event a line
            event: dict[str, Any] = msgspec.json.decode(line.strip().strip(b"[],") or b"{}")
            if event.get("ph") == "X":
                seconds[event["name"]] += event["dur"] / 1e6
    total = sum(seconds.values()) or 1.0
    table = Table("call", "busy seconds", "share", title="where the workers' time went", title_justify="left")
    for call, busy in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(call, f"{busy:.1f}", f"{busy / total:.0%}")
    return table
