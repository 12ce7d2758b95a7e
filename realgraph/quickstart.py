"""`realgraph quickstart`: a random model learns sums by SFT, then by RL, by the commands that a user would type."""

import sys
import time
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from realgraph.arithmetic import write_data, write_model
from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.run_command import FAILED, INTERRUPTED, execute, report
from realgraph.running import prepare
from realgraph.runtime.master import Outcome
from realgraph.runtime.run_folder import RunFolder
from realgraph.summary import summarise

ALGORITHMS = ("grpo", "ppo")


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
    warm = run(home / "sft.yaml", [f"outputs.dir={home / 'sft'}", f"seed={seed}"], console)
    (home / "warm").symlink_to(Path("sft") / "checkpoints" / warm.name / "actor")

    console.rule(f"[bold]3. reinforcement learning: realgraph run {algorithm}.yaml")
    overrides = [f"outputs.dir={home / algorithm}", f"seed={seed}"]
    run(home / f"{algorithm}.yaml", [*overrides, *([f"steps={steps}"] if steps else [])], console)

    console.rule("[bold]4. the result")
    summarise(RunFolder(home / algorithm), console)
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


def run(file: Path, overrides: list[str], console: Console) -> Path:
    """One run to its end; its newest checkpoint. Exits where it failed."""
    prepared = prepare(file, overrides, None)
    outcome: Outcome = execute(prepared, console)
    report(outcome, prepared)
    if not outcome.ok or outcome.saved is None:
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)
    return outcome.saved
