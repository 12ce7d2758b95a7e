"""The task of the quickstart: two-digit sums as text, with a character tokenizer and a tiny model made from nothing."""

import random
from pathlib import Path
from typing import Any

import msgspec

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


def write_model(folder: Path, seed: int) -> int:
    """A random Qwen3 of 593k parameters and its tokenizer, in the Hugging Face form. Returns the parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    vocabulary = {character: index for index, character in enumerate(CHARACTERS + EOS + PAD)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(folder)

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
