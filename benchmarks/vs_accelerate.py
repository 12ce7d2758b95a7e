"""SFT of 30M parameters in this project and in TRL's SFTTrainer under accelerate's FSDP2: trained tokens per second.

Run from the root of the repository: `python -m benchmarks.vs_accelerate` (8 minutes on idle cores), `--quick` a look.
Both systems have two processes of one thread each on the same two cores. TRL gets the best of its settings (samples of
a micro-batch, batches of like lengths or of random ones), then it and our layouts take turns. `limit`: what the bare
matrix products alone would leave of both cores' time (`bare_products`), which nobody reaches in float32, and the share
of it that each reaches per CPU second of all its processes, a measure that waiting and other load hardly touch. Equal:
model, tokenizer, rows (long-tailed lengths), samples a step, loss (mean over response tokens), AdamW and its settings,
float32. TRL pads each micro-batch to its longest sample: its packing needs flash attention. Only steps in steady state
count: no start, no saving.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.bare_products import seconds_a_token
from benchmarks.character_models import character_model
from benchmarks.grpo_runs import CpuClock, execute, steps_of
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "vs_accelerate.json"
SAMPLES = 32  # a step
STEPS = 6
SKIPPED = 2  # of them, before the steady state
ROUNDS = 2
TARGET = 2.0
LR = 1e-5
PROMPT_TOKENS = 8
BUDGET = 2048  # tokens of a micro-batch of ours: like TRL's, of the sizes that were tried the fastest
CHARACTERS = [chr(0x4E00 + number) for number in range(4095)]  # a token each
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "head_dim": 64}
SIZES |= {"max_position_embeddings": 1024, "tie_word_embeddings": True}
PINS: dict[str, dict[str, Any]] = {
    "fsdp 2": {"sharding": "fsdp", "devices": 2, "max_tokens_per_microbatch": BUDGET},
    "tp 2": {"tp": 2, "devices": 2, "max_tokens_per_microbatch": BUDGET},
}


@dataclass(frozen=True)
class Setting:
    """A way for TRL to run. microbatch: samples of one backward pass of a process. by_length: like ones together."""

    microbatch: int
    by_length: bool
    fsdp: bool = True

    def __str__(self) -> str:
        order = "by length" if self.by_length else "at random"
        return f"{'FSDP2' if self.fsdp else 'DDP'}, {self.microbatch} a pass, {order}"


SETTINGS = (Setting(2, True), Setting(4, True), Setting(16, True), Setting(4, False), Setting(4, True, fsdp=False))
QUICK = (Setting(4, True),)


@dataclass(frozen=True)
class Rate:
    """Trained tokens per second of the clock, and of the CPU time of all processes together."""

    per_second: float
    per_cpu_second: float


def rate_of(trained: float, clock: CpuClock, begin: float, end: float) -> Rate:
    """The rate of the tokens that were trained on between two moments of time.time()."""
    return Rate(trained / (end - begin), trained / clock.between(begin, end))


def make_folder(home: Path) -> None:
    """Model, tokenizer and rows: prompts of 8 tokens, responses of 8 to 504 tokens, log-normal."""
    model, _ = character_model(home / "model", "".join(CHARACTERS), "$", **SIZES)
    model.save_pretrained(home / "model")
    rng = random.Random(0)
    rows = []
    for _ in range(SAMPLES * (STEPS + 2)):
        length = min(504, max(8, int(rng.lognormvariate(3.8, 0.9))))
        rows.append(
            {
                "prompt": "".join(rng.choices(CHARACTERS, k=PROMPT_TOKENS)),
                "answer": "".join(rng.choices(CHARACTERS, k=length)),
            }
        )
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_ours(home: Path, pins: dict[str, Any]) -> Rate:
    """The rate of `realgraph run` under the pins."""
    out = Path(tempfile.mkdtemp(prefix="ours-", dir=home))
    run = {
        "graph": "sft",
        "params": {"lr": LR},
        "models": {"actor": {"path": "model", "dtype": "float32"}},
        "data": {
            "path": "train.jsonl",
            "max_prompt_tokens": PROMPT_TOKENS,
            "columns": {"prompt": "prompt", "response": "answer"},
        },
        "batch": {"groups": SAMPLES, "max_new_tokens": 512},
        "calls": {"train": {"optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.0}}},
        "allocation": {"train": pins},
        "cluster": {"nodes": 1, "devices": 2, "kind": "cpu"},
        "steps": STEPS,
        "seed": 1,
    }
    (home / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    command = [sys.executable, "-m", "realgraph.cli", "run", str(home / "run.yaml"), f"outputs.dir={out / 'run'}"]
    clock = execute(command, 1, out / "log.txt")
    steps = steps_of(out / "run")
    sizes = [(step["metrics"]["batch/tokens"], step["metrics"]["batch/samples"]) for step in steps[SKIPPED:]]
    trained = sum(tokens - PROMPT_TOKENS * samples for tokens, samples in sizes)
    return rate_of(trained, clock, steps[SKIPPED - 1]["time"], steps[-1]["time"])


def run_trl(home: Path, setting: Setting) -> Rate:
    """The rate of TRL's trainer."""
    out = Path(tempfile.mkdtemp(prefix="trl-", dir=home))
    task = {"home": str(home), "out": str(out), "samples": SAMPLES, "steps": STEPS, "lr": LR, **asdict(setting)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [sys.executable, *launcher, "-m", "benchmarks.trl_sft_process", json.dumps(task)]
    clock = execute(program, 1, out / "log.txt")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank-*.json"))]
    ends = reports[0]["ends"]
    trained = sum(report["tokens"][-1] - report["tokens"][SKIPPED - 1] for report in reports)
    return rate_of(trained, clock, ends[SKIPPED - 1], ends[-1])


def limit_of(home: Path) -> float:
    """Trained tokens per CPU second of one core that does nothing but the matrix products of these rows: prompts go
    through the layers too, the last token of a row does not, and trained tokens alone need the head."""
    layers, head = seconds_a_token(home / "model", BUDGET, processes=2)
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = sum(len(row["answer"]) + 1 for row in rows)  # and the end of the text
    return trained / (layers * (trained + (PROMPT_TOKENS - 1) * len(rows)) + head * trained)


def measure(home: Path, quick: bool) -> dict[str, Any]:
    """Rates of all, in tokens/s, the ratios to the best of TRL, and the limit of both."""
    make_folder(home)

    def turn(label: str, run: Callable[[], Rate]) -> Rate:
        rate = run()
        shown = f"{rate.per_second:8.0f} trained tokens/s {rate.per_cpu_second:8.0f} per CPU second"
        print(f"{label:36} {shown}", flush=True)
        return rate

    tried = {one: turn(f"trl: {one}", lambda one=one: run_trl(home, one)) for one in (QUICK if quick else SETTINGS)}  # type: ignore[misc]
    best = max((one for one in tried if one.fsdp), key=lambda one: tried[one].per_second)
    theirs: list[Rate] = []
    ours: dict[str, list[Rate]] = {name: [] for name in PINS}
    limits: list[float] = []
    for _ in range(1 if quick else ROUNDS):
        limits.append(limit_of(home))
        theirs.append(turn(f"trl: {best}", lambda: run_trl(home, best)))
        for name, pins in PINS.items():
            ours[name].append(turn(f"ours: {name}", lambda pins=pins: run_ours(home, pins)))  # type: ignore[misc]
    ratios = {name: round(ratio_of(rates, theirs, "per_second"), 2) for name, rates in ours.items()}
    limit = limit_report(statistics.median(limits), theirs, ours)
    for name, ratio in ratios.items():
        print(f"{'PASS' if ratio >= TARGET else 'FAIL'} {name}: {ratio:.2f} x TRL ({best}), wanted {TARGET:g}")
    return {
        "target": TARGET,
        "ratios": ratios,
        "limit": limit,
        "best_trl_setting": str(best),
        "tokens": {
            "ours": {name: [asdict(rate) for rate in rates] for name, rates in ours.items()},
            "trl_best": [asdict(rate) for rate in theirs],
            "trl_settings": {str(setting): asdict(rate) for setting, rate in tried.items()},
        },
    }


def ratio_of(rates: Sequence[Rate], others: Sequence[Rate], which: Literal["per_second", "per_cpu_second"]) -> float:
    """Our median over the others'."""
    ours, theirs = (statistics.median(getattr(rate, which) for rate in some) for some in (rates, others))
    return float(ours / theirs)


def limit_report(limit: float, theirs: Sequence[Rate], ours: dict[str, list[Rate]]) -> dict[str, Any]:
    """Prints and returns the limit, the ratios per CPU second, and the shares of the limit. limit: tokens per CPU
    second."""
    cpu = {name: ratio_of(rates, theirs, "per_cpu_second") for name, rates in ours.items()}
    peer = statistics.median(rate.per_cpu_second for rate in theirs)
    shares = {"trl": peer / limit} | {name: ratio * peer / limit for name, ratio in cpu.items()}
    on_clock = 2 * limit / statistics.median(rate.per_second for rate in theirs)
    print(f"limit: bare products {2 * limit:.0f} trained tokens/s on two cores, {on_clock:.2f} x TRL by the clock")
    print(f"limit: {limit / peer:.2f} x TRL per CPU second, of which ours have " + _listed(cpu, "{:.2f} x"))
    print("limit: share of the bare products' rate per CPU second: " + _listed(shares, "{:.0%}"))
    return {
        "tokens_per_cpu_second": round(limit, 1),
        "ratio_by_clock": round(on_clock, 2),
        "ratio_per_cpu_second": round(limit / peer, 2),
        "ratios_per_cpu_second": {name: round(ratio, 2) for name, ratio in cpu.items()},
        "shares": {name: round(share, 2) for name, share in shares.items()},
    }


def _listed(numbers: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {form.format(number)}" for name, number in numbers.items())


def main() -> int:
    """Measure, print, write the results; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one setting of TRL, one round; writes no results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vs-accelerate-") as home:
        found = measure(Path(home), options.quick)
    if not options.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {"machine": describe(), "load_before": round(load, 2), **found}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(ratio >= TARGET for ratio in found["ratios"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
