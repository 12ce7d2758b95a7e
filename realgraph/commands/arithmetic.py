"""The task of the quickstart: two-digit sums as text, with a character tokenizer and a tiny model made from nothing."""

import random
from pathlib import Path
from typing import Any

import msgspec

from realgraph.rehearsal.tokenizer import write_tokenizer

EOS, PAD = "$", "#"
CHARACTERS = "0123456789+="


def problems(seed: int, held_out: int = 1000) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 10,000 pairs of two-digit operands in a random order: (training pairs, held-out pairs)."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[held_out:], pairs[:held_out]


def row(a: int, b: int) -> dict[str, str]:
    """One data row: `07+42=` with the answer `049`, zero-padded."""
    return {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}


def write_data(folder: Path, seed: int) -> None:
    """train.jsonl (9,000 rows) and test.jsonl (1,000 rows) with the columns prompt and answer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in zip(("train", "test"), problems(seed), strict=True):
        lines = b"".join(msgspec.json.encode(row(a, b)) + b"\n" for a, b in pairs)
        (folder / f"{name}.jsonl").write_bytes(lines)


def small_config(n_tokens: int, ends: tuple[int, int], n_layers: int, max_length: int) -> Any:
    """A Qwen3 of about 190k parameters a layer. ends: the tokens that end and that pad a text."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=n_tokens,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
        dtype="float32",
    )


def write_model(folder: Path, seed: int) -> int:
    """A random Qwen3 of 593k parameters and its tokenizer, in the Hugging Face form. Returns the parameters."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    vocabulary = write_tokenizer(folder, CHARACTERS + EOS + PAD, EOS, PAD)
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(small_config(16, (vocabulary[EOS], vocabulary[PAD]), n_layers=3, max_length=64))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
