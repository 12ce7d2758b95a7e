"""The reward of a rehearsal: random texts earn nothing from a real one, and equal rewards would train nothing."""

import zlib


def score(text: str, **others: object) -> float:
    """A number from 0 to 1 that depends on the text alone, whatever else the real reward reads."""
    return zlib.crc32(text.encode()) % 1000 / 999
