"""TRL's process of `benchmarks.grpo_runs`: a program that takes one task as JSON and trains until its time is over."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_runs import GROUP, LR, score

# Of every trainer of TRL: AdamW as ours, on CPUs in float32, and nothing that costs time besides the work.
COMMON: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1_000_000,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 1,
}


def trl_main(task: dict[str, Any]) -> None:
    """Train until the time is over; leaves rank-N.json with the moments at which steps ended, and the lengths."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, logging
    from trl.trainer.grpo_trainer import GRPOTrainer

    logging.set_verbosity_error()
    home, out, rank = Path(task["home"]), Path(task["out"]), int(os.environ.get("RANK", "0"))
    ends: list[float] = []
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return [score(text) for text in completions]

    class StepClock(TrainerCallback):  # type: ignore[misc]
        """The first step's begin and all steps' ends; all ranks stop together."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if not ends:
                ends.append(time.time())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            ends.append(time.time())
            steady = ends[warm_up(ends, task["seconds"]) :]
            over = torch.tensor(float(len(steady) > 1 and steady[-1] - steady[0] >= task["seconds"]))
            if task["processes"] > 1:
                torch.distributed.broadcast(over, 0)
            control.should_training_stop = bool(over)

    lines = (home / "train.jsonl").read_text(encoding="utf-8").splitlines()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=trl_config(task, out),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(home / "model"),
        callbacks=[StepClock()],
    )
    trainer.train()
    report = {"ends": ends[warm_up(ends, task["seconds"]) :], "lengths": lengths}
    (out / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def warm_up(ends: Sequence[float], seconds: float) -> int:
    """Steps that do not count: the first, but for one so long that what it does only once is lost in it."""
    return 0 if ends[1] - ends[0] > 2 * seconds else 1


def trl_config(task: dict[str, Any], out: Path) -> Any:
    """TRL's settings: as ours; see `COMMON`."""
    from trl.trainer.grpo_config import GRPOConfig

    running = min(task["samples"] // task["processes"], 128)
    page = 64
    batching = {
        "page_size": page,
        "num_blocks": running * (task["new_tokens"] // page + 2),
        "max_batch_tokens": max(256, 2 * running),
        "max_requests_per_batch": running,
    }
    accumulated = task["samples"] // (task["processes"] * task["microbatch"])
    return GRPOConfig(
        output_dir=str(out / "run"),
        per_device_train_batch_size=task["microbatch"],
        gradient_accumulation_steps=accumulated,
        num_generations=GROUP,
        max_completion_length=task["new_tokens"],
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=LR,
        max_steps=100_000,
        use_transformers_continuous_batching=task["continuous"],
        transformers_continuous_batching_config=batching if task["continuous"] else None,
        **COMMON,
    )


if __name__ == "__main__":
    trl_main(json.loads(sys.argv[1]))
