"""`realgraph quickstart`: a random model learns sums by SFT, then by RL, by the commands that a user would type."""

import sys
import time
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from realgraph.arithmetic import write_data, write_model
from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.run_command import FAILED, INTERRUPTED, execute, report
from realgraph.running import prepare
from realgraph.runtime.master import Outcome
from realgraph.runtime.observer import EvalRecord, RunRecord, Span, StepRecord, Transcript
from realgraph.runtime.run_folder import RunFolder

ALGORITHMS = ("grpo", "ppo")
SHOWN_PROBLEMS = 6


class Diary:
    """Remembers what the summary needs."""

    def __init__(self) -> None:
        self.evals: list[EvalRecord] = []
        self.steps: list[StepRecord] = []
        self.transcripts: dict[int, list[str]] = defaultdict(list)  # evaluated step -> held-out samples
        self.call_seconds: dict[str, float] = defaultdict(float)  # busy seconds, all workers together

    def observe(self, record: RunRecord) -> None:
        match record:
            case EvalRecord():
                self.evals.append(record)
            case StepRecord():
                self.steps.append(record)
            case Transcript(split="eval", step=step, text=text):
                self.transcripts[step].append(text)
            case Span(call=call, started=started, ended=ended):
                self.call_seconds[call] += ended - started
            case _:
                pass

    def close(self) -> None:
        pass


def quickstart_command(folder: Path, algorithm: str, seed: int, steps: int | None) -> None:
    """The whole quickstart; exits with 3 where a run failed. Raises ConfigError."""
    if algorithm not in ALGORITHMS:
        text = f"no quickstart for {algorithm!r}"
        raise ConfigError([Problem(Where("command line"), text, suggest(algorithm, ALGORITHMS))])
    console = Console()
    began = time.monotonic()
    home = fresh_folder(folder)
    console.rule("[bold]1. a model, a tokenizer and a data set, made from nothing")
    console.print(
        f"{prepare_folder(home, algorithm, seed):,} parameters, 9,000 training and 1,000 held-out sums: {home}"
    )

    console.rule("[bold]2. warm-up by supervised fine-tuning: realgraph run sft.yaml")
    warm = run(home / "sft.yaml", [f"outputs.dir={home / 'sft'}", f"seed={seed}"], console, Diary())
    (home / "warm").symlink_to(Path("sft") / "checkpoints" / warm.name / "actor")

    console.rule(f"[bold]3. reinforcement learning: realgraph run {algorithm}.yaml")
    overrides = [f"outputs.dir={home / algorithm}", f"seed={seed}"]
    diary = Diary()
    run(home / f"{algorithm}.yaml", [*overrides, *([f"steps={steps}"] if steps else [])], console, diary)
    summarise(diary, home, algorithm, console)
    console.print(f"all of it took {time.monotonic() - began:.0f} s")


def fresh_folder(folder: Path) -> Path:
    """`folder`, or `folder-2`, ... where there was a quickstart before."""
    folder = folder.expanduser().absolute()
    candidates = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def prepare_folder(home: Path, algorithm: str, seed: int) -> int:
    """Model, data and run files. Returns the model's parameters."""
    write_data(home / "data", seed)
    n_parameters = write_model(home / "model", seed)
    for name in ("sft", algorithm):
        source = files("realgraph") / "configs" / f"quickstart_{name}.yaml"
        (home / f"{name}.yaml").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return n_parameters


def run(file: Path, overrides: list[str], console: Console, diary: Diary) -> Path:
    """One run to its end; its newest checkpoint. Exits where it failed."""
    prepared = prepare(file, overrides, None)
    outcome: Outcome = execute(prepared, console, [diary])
    report(outcome, prepared)
    if not outcome.ok or outcome.saved is None:
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)
    return outcome.saved


def summarise(diary: Diary, home: Path, algorithm: str, console: Console) -> None:
    """Before and after on held-out problems, some of them in full, where the time went, and what to try next."""
    console.rule("[bold]4. what it learned")
    if diary.evals:
        first, last = diary.evals[0], diary.evals[-1]
        table = Table("held-out sums (1,000)", "before", "after", title_justify="left")
        for name in sorted(first.metrics.keys() & last.metrics.keys()):
            table.add_row(name, f"{first.metrics[name]:.3f}", f"{last.metrics[name]:.3f}")
        rewards = [record.metrics["reward/reward"] for record in diary.steps if "reward/reward" in record.metrics]
        if rewards:
            head, tail = rewards[:5], rewards[-5:]
            mean_head, mean_tail = sum(head) / len(head), sum(tail) / len(tail)
            table.add_row("sampled, in training", f"{mean_head:.3f}", f"{mean_tail:.3f}")
        console.print(table)
        both = zip(diary.transcripts[first.step], diary.transcripts[last.step], strict=False)
        samples = Table("before", "after", title="the same held-out problems", title_justify="left")
        for before, after in list(both)[:SHOWN_PROBLEMS]:
            samples.add_row(before, after)
        console.print(samples)
    total = sum(diary.call_seconds.values())
    times = Table("call", "busy seconds", "share", title="where the workers' time went", title_justify="left")
    for call, seconds in sorted(diary.call_seconds.items(), key=lambda item: -item[1]):
        times.add_row(call, f"{seconds:.1f}", f"{seconds / total:.0%}")
    console.print(times)
    folder = RunFolder(home / algorithm)
    console.print(f"run directory: {folder.root}")
    console.print(f"try it:        realgraph generate {folder.root} '12+34='", highlight=False)
    console.print(f"trace:         {folder.trace}  (open it in https://ui.perfetto.dev)", highlight=False)
