"""`realgraph quickstart`: a random model learns sums by SFT, then by RL, by the commands that a user would type."""

import json
import sys
import time
from importlib.resources import files
from pathlib import Path

from rich.text import Text

from realgraph.commands.arithmetic import write_data, write_model
from realgraph.commands.generate import SamplingRequest, answers
from realgraph.commands.run import FAILED, INTERRUPTED, execute, report
from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.run.resume import resumed
from realgraph.run.running import PreparedRun, prepare
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.master import RunOutcome
from realgraph.screen.summary import summarise
from realgraph.screen.terminal import Terminal, run_terminal

ALGORITHMS = ("grpo", "ppo")
WARM_ACCURACY = 0.35  # sampled, on held-out sums
MORE_WARM_STEPS, MOST_WARM_STEPS = 40, 480
N_PROBED_LINES = 400


def quickstart_command(folder: Path, algorithm: str, seed: int, steps: int | None) -> None:
    """The whole quickstart; exits with 3 where a run failed. Raises ConfigError."""
    if algorithm not in ALGORITHMS:
        text = f"no quickstart for {algorithm!r}"
        raise ConfigError([Problem(Where("command line"), text, suggest(algorithm, ALGORITHMS))])
    console = run_terminal()
    began = time.monotonic()
    home = fresh_folder(folder)
    console.rule(Text("1. a model, a tokenizer and a data set, made from nothing", style="bold"))
    console.print(
        f"{prepare_folder(home, algorithm, seed):,} parameters, 9,000 training and 1,000 held-out sums: {home}"
    )

    console.rule(Text("2. warm-up by supervised fine-tuning: realgraph run sft.yaml", style="bold"))
    warm_up(home, seed, console)

    console.rule(Text(f"3. reinforcement learning: realgraph run {algorithm}.yaml", style="bold"))
    overrides = [f"outputs.dir={home / algorithm}", f"seed={seed}"]
    overrides += [f"steps={steps}"] if steps else []
    run(prepare(home / f"{algorithm}.yaml", overrides, None), console)

    console.rule(Text("4. the result", style="bold"))
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


def warm_up(home: Path, seed: int, console: Terminal) -> None:
    """Fine-tune until the model is right often enough for RL to have something to reinforce; link it as `warm`.

    Seeds differ in how long that takes, so the run is resumed with more steps while it is not.
    """
    prepared = prepare(home / "sft.yaml", [f"outputs.dir={home / 'sft'}", f"seed={seed}"], None)
    model, steps = run(prepared, console) / "actor", prepared.job.steps
    while True:
        share = sampled_accuracy(home, model)
        console.print(f"accuracy on held-out sums, sampled: {share:.2f} (wanted: {WARM_ACCURACY} or more)")
        if share >= WARM_ACCURACY or steps >= MOST_WARM_STEPS:
            break
        steps += MORE_WARM_STEPS
        with resumed(home / "sft", [f"steps={steps}"]) as prepared:
            model = run(prepared, console) / "actor"
    (home / "warm").symlink_to(model.relative_to(home))


def sampled_accuracy(home: Path, model: Path) -> float:
    """Share of the first held-out sums that are right at temperature 1."""
    lines = (home / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:N_PROBED_LINES]
    rows = [json.loads(line) for line in lines]
    texts = answers(model, [row["prompt"] for row in rows], SamplingRequest(temperature=1.0, max_new_tokens=8))
    right = [text == row["answer"] for row, (_, text) in zip(rows, texts, strict=True)]
    return float(sum(right)) / len(right)


def run(prepared: PreparedRun, console: Terminal) -> Path:
    """One run to its end; its newest checkpoint. Exits where it failed."""
    outcome: RunOutcome = execute(prepared, console)
    if not outcome.ok or outcome.saved is None:
        report(outcome, prepared, console)
        sys.exit(INTERRUPTED if outcome.interrupted else FAILED)
    return outcome.saved
