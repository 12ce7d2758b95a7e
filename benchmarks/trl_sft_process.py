"""TRL's process of `benchmarks.vs_accelerate`: SFTTrainer under accelerate's FSDP2, or DDP, until its time is over."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.trl_process import COMMON


class CountingTrainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that counts the tokens it trains on, and shards its model on CPUs where it is told to.

    accelerate takes FSDP for GPUs alone, though its FSDP2 runs over gloo: `distributed_type` is set behind its back.
    """

    plugin: FullyShardedDataParallelPlugin | None = None
    n_trained = 0

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.plugin is not None:
            for state in (AcceleratorState._shared_state, PartialState._shared_state):
                state["distributed_type"] = DistributedType.FSDP
            AcceleratorState._shared_state["fsdp_plugin"] = self.plugin
            self.is_fsdp_enabled = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        self.n_trained += int((inputs["labels"] != -100).sum())
        return super().compute_loss(model, inputs, *args, **named)


class StepClock(TrainerCallback):  # type: ignore[misc]
    """The moments and the trained tokens at which steps end."""

    def __init__(self) -> None:
        self.trainer: CountingTrainer | None = None
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        assert self.trainer is not None
        self.ends.append(time.time())
        self.tokens.append(self.trainer.n_trained)


def main(task: dict[str, Any]) -> None:
    """Train for the steps of the task; leaves rank-N.json."""
    import torch
    from datasets import Dataset
    from torch.distributed.fsdp import FSDPModule
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    home, out, rank = Path(task["home"]), Path(task["out"]), int(os.environ.get("RANK", "0"))
    if task["fsdp"]:
        CountingTrainer.plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
            reshard_after_forward=True,
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = StepClock()
    clock.trainer = CountingTrainer(
        model=AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32),
        args=config(task, out),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(home / "model"),
        callbacks=[clock],
    )
    clock.trainer.train()
    assert isinstance(clock.trainer.model_wrapped, FSDPModule) == task["fsdp"]
    report = {"ends": clock.ends, "tokens": clock.tokens}
    (out / f"rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def config(task: dict[str, Any], out: Path) -> Any:
    """TRL's settings: as ours; see `COMMON`."""
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(
        output_dir=str(out / "run"),
        per_device_train_batch_size=task["microbatch"],
        gradient_accumulation_steps=task["samples"] // (2 * task["microbatch"]),
        train_sampling_strategy="group_by_length" if task["by_length"] else "random",
        max_length=None,
        learning_rate=task["lr"],
        max_steps=task["steps"],
        **COMMON,
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
