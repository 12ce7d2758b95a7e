"""A random model with the quickstart's tokenizer, for the short runs of a profile. Imports torch."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from realgraph.planner.costs.calibrate.measurements import config_json
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.inputs.model_spec import ModelSpec


def write_weights(folder: Path, model: ModelSpec, dtype: DType) -> None:
    """Shrink the model in `folder`, which brings a tokenizer, to `model`: config.json and random weights."""
    had = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    ends = {name: had[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id") if name in had}
    (folder / "config.json").write_bytes(msgspec.json.encode({**config_json(model, dtype), **ends}))
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    models.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
