"""SFT of 30M parameters in this project and in TRL's SFTTrainer under accelerate's FSDP2: trained tokens per second.

Run from the root of the repository: `python -m benchmarks.vs_accelerate` (8 minutes on idle cores), `--quick` a look.
Both systems have two processes of one thread each on the same two cores. TRL gets the best of its settings (samples of
a micro-batch, batches of like lengths or of random ones), then it and our layouts take turns. Equal: model, tokenizer,
rows (long-tailed lengths), samples a step, loss (mean over response tokens), AdamW and its settings, float32. TRL pads
each micro-batch to its longest sample: its packing needs flash attention. Only steps in steady state count: no start,
no saving.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.grpo_runs import execute, steps_of
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "vs_accelerate.json"
SAMPLES = 32  # a step
STEPS = 6
SKIPPED = 2  # of them, before the steady state
ROUNDS = 2
TARGET = 2.0
LR = 1e-5
PROMPT_TOKENS = 8
BUDGET = 1024  # tokens of a micro-batch of ours
CHARACTERS = [chr(0x4E00 + number) for number in range(4095)]  # a token each
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


def make_folder(home: Path) -> None:
    """Model, tokenizer and rows: prompts of 8 tokens, responses of 8 to 504 tokens, log-normal."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from realgraph.rehearsal.tokenizer import write_tokenizer

    disable_progress_bar()
    vocabulary = write_tokenizer(home / "model", "".join(CHARACTERS) + "$", "$", "$")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["$"],
        pad_token_id=vocabulary["$"],
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(home / "model")
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


def run_ours(home: Path, pins: dict[str, Any]) -> float:
    """Trained tokens per second of `realgraph run` under the pins."""
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
    execute(command, 1, out / "log.txt")
    steady = steps_of(out / "run")[SKIPPED:]
    sizes = [(step["metrics"]["batch/tokens"], step["metrics"]["batch/samples"]) for step in steady]
    trained = sum(tokens - PROMPT_TOKENS * samples for tokens, samples in sizes)
    return float(trained / sum(step["seconds"] for step in steady))


def run_trl(home: Path, setting: Setting) -> float:
    """Trained tokens per second of TRL's trainer."""
    out = Path(tempfile.mkdtemp(prefix="trl-", dir=home))
    task = {"home": str(home), "out": str(out), "samples": SAMPLES, "steps": STEPS, "lr": LR, **asdict(setting)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    execute([sys.executable, *launcher, "-m", "benchmarks.trl_sft_process", json.dumps(task)], 1, out / "log.txt")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank-*.json"))]
    ends = reports[0]["ends"]
    tokens = sum(report["tokens"][-1] - report["tokens"][SKIPPED - 1] for report in reports)
    return float(tokens / (ends[-1] - ends[SKIPPED - 1]))


def measure(home: Path, quick: bool) -> dict[str, Any]:
    """Rates of all, in tokens/s, and the ratios to the best of TRL."""
    make_folder(home)

    def turn(label: str, run: Callable[[], float]) -> float:
        rate = run()
        print(f"{label:36} {rate:8.0f} trained tokens/s", flush=True)
        return rate

    tried = {one: turn(f"trl: {one}", lambda one=one: run_trl(home, one)) for one in (QUICK if quick else SETTINGS)}  # type: ignore[misc]
    best = max((one for one in tried if one.fsdp), key=lambda one: tried[one])
    theirs: list[float] = []
    ours: dict[str, list[float]] = {name: [] for name in PINS}
    for _ in range(1 if quick else ROUNDS):
        theirs.append(turn(f"trl: {best}", lambda: run_trl(home, best)))
        for name, pins in PINS.items():
            ours[name].append(turn(f"ours: {name}", lambda pins=pins: run_ours(home, pins)))  # type: ignore[misc]
    peer = statistics.median(theirs)
    ratios = {name: round(statistics.median(rates) / peer, 2) for name, rates in ours.items()}
    for name, ratio in ratios.items():
        print(f"{'PASS' if ratio >= TARGET else 'FAIL'} {name}: {ratio:.2f} x TRL ({best}), wanted {TARGET:g}")
    return {
        "target": TARGET,
        "ratios": ratios,
        "best_trl_setting": str(best),
        "tokens_per_s": {
            "ours": ours,
            "trl_best": theirs,
            "trl_settings": {str(setting): rate for setting, rate in tried.items()},
        },
    }


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
