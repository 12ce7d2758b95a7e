"""The functions of a rehearsal in the place of those that real texts need: random ones earn nothing from a real reward,
and equal rewards would train nothing; a real question is longer than a rehearsal's prompts."""

import zlib


def score(text: str, **others: object) -> float:
    """A number from 0 to 1 that depends on the text alone, whatever else the real reward reads."""
    return zlib.crc32(text.encode()) % 1000 / 999


def ask(length: int, **read: object) -> str:
    """A prompt of at most `length` characters, the last of all texts that the real function reads."""
    return "".join(text for text in read.values() if isinstance(text, str))[-length:] or "0"
