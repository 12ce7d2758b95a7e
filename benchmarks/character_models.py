"""Small Qwen3 models with random weights and a token for each character, for benchmarks that train them."""

from pathlib import Path
from typing import Any

SEED = 0


def character_model(folder: Path, characters: str, end: str, **sizes: Any) -> tuple[Any, dict[str, int]]:
    """Such a model in float32 and its vocabulary, whose tokenizer is in `folder` afterwards; the model is not saved.
    end: the character that ends a text and pads. sizes: of its configuration."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from realgraph.rehearsal.tokenizer import write_tokenizer

    disable_progress_bar()
    vocabulary = write_tokenizer(folder, characters + end, end, end)
    torch.manual_seed(SEED)
    ends = {"bos_token_id": None, "eos_token_id": vocabulary[end], "pad_token_id": vocabulary[end]}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = Qwen3Config(vocab_size=len(vocabulary), dtype="float32", **heads, **ends, **sizes)
    return Qwen3ForCausalLM(config), vocabulary
