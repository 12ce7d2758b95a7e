"""A tokenizer of one token a character, made from nothing."""

from pathlib import Path
from typing import Any


def write_tokenizer(folder: Path, characters: str, eos: str | None, pad: str) -> dict[str, int]:
    """A tokenizer of one token a character, in the Hugging Face form; what it does not know is `pad`.

    Returns character -> token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad).save_pretrained(folder)
    return vocabulary
