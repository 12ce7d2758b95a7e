"""A model of the same structure at toy width: layers, heads, experts, ties and windows stay, sizes of vectors shrink.

Random weights: transformers writes them in the Hugging Face form, as any model of a run has.
"""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import Where
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.rehearsal.tokenizer import write_tokenizer
from realgraph.runtime.parallel.cuts import SCORE

HEAD_DIM = 2  # even, as rotary embeddings need
SMALLEST_VECTOR = 8
EOS, PAD = "$", "#"
CHARACTERS = string.ascii_letters + string.digits
VOCABULARY = len(CHARACTERS) + len(EOS + PAD)  # 64: cut evenly by what cuts a real vocabulary evenly
NOT_THE_MODELS = ("ids", "n_params")  # of the table of known models


def toy_config(config: Mapping[str, Any], positions: int, factor: float) -> dict[str, Any]:
    """A config.json of the same structure at toy width. positions: of the longest sample. factor: of token counts, for
    sliding windows. A vocabulary that ranks cut unevenly stays such. Raises ConfigError for unknown architectures."""
    spec = spec_from_config(config, Where())
    hidden = _scaled(spec.hidden, HEAD_DIM / spec.head_dim)
    width = hidden / spec.hidden
    toy = {name: value for name, value in config.items() if name not in NOT_THE_MODELS}
    toy |= {
        "hidden_size": hidden,
        "head_dim": HEAD_DIM,
        "intermediate_size": _scaled(spec.intermediate, width),
        "vocab_size": VOCABULARY + spec.vocab % VOCABULARY,
        "max_position_embeddings": positions,
        "initializer_range": hidden**-0.5,  # so that probabilities differ
        "bos_token_id": None,
        "eos_token_id": len(CHARACTERS),
        "pad_token_id": len(CHARACTERS) + 1,
        "dtype": "float64",
    }
    if spec.experts and spec.architecture not in ("mixtral", "gpt_oss"):  # whose experts are as wide as an MLP
        toy["moe_intermediate_size"] = _scaled(spec.expert_intermediate, width)
    if spec.latent is not None:
        ranks = {"q_lora_rank": spec.latent.query_rank, "kv_lora_rank": spec.latent.kv_rank}
        toy |= {name: _scaled(size, width) for name, size in ranks.items() if size}
        toy |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM)
        del toy["head_dim"]
    if config.get("sliding_window"):
        toy["sliding_window"] = max(2, round(config["sliding_window"] * factor))
    return toy


def _scaled(size: int, factor: float) -> int:
    """A size of vectors: even where it was."""
    scaled = max(SMALLEST_VECTOR, round(size * factor))
    return scaled + (scaled - size) % 2


class ToyModel(Struct, frozen=True):
    """A random model to be written. config: of `toy_config`. scores: with a score head, which a role that never learns
    one needs."""

    folder: str
    config: dict[str, Any]
    seed: int
    scores: bool = False


def write_toy_models(payload: bytes) -> None:
    """Write the models that `ToyModel`s in MessagePack describe; in a process that has torch loaded."""
    for model in msgspec.msgpack.decode(payload, type=list[ToyModel]):
        write_toy_model(Path(model.folder), model.config, model.seed)
        if model.scores:
            _add_score_head(Path(model.folder), model.config["hidden_size"])


def _add_score_head(folder: Path, hidden: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    head = torch.randn(1, hidden, dtype=torch.float64) * hidden**-0.5
    save_file({**load_file(file), SCORE: head}, file, {"format": "pt"})


def write_toy_model(folder: Path, config: Mapping[str, Any], seed: int) -> int:
    """A random model of `config` and its character tokenizer. Returns the parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    auto: Any = AutoModelForCausalLM
    logging.disable_progress_bar()
    write_tokenizer(folder, CHARACTERS + EOS + PAD, EOS, PAD)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(config["model_type"], **fields)).double()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
