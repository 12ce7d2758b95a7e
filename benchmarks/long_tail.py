"""A model, data and rewards whose samples have log-normal lengths, for `benchmarks.async_vs_sync`. Measures nothing.

The model is a Qwen3 whose layers add nothing to its embeddings, at their usual cost: the next token follows from the
last one alone. Its tokens are numbered, each is followed by the next number or by the end, and the probability of the
end is that of a log-normal length which has come so far.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.character_models import character_model

STATES = 240  # numbered tokens: the longest sample
MEDIAN, SIGMA = 18.0, 1.15  # of the length
LEAST_RATIO = 10.0  # of the longest to the median
HIDDEN, INTERMEDIATE, LAYERS = 256, 768, 2
FIRST, START, END = 0x100, "=", "$"
N_ROWS, PROMPT = 2000, 8
NEVER = -30.0  # log-probability of all other tokens
SEED = 0
REWARDS = '''"""Checksums as rewards, so that groups have a signal; `slow` takes its time."""

import asyncio


def score(text: str) -> float:
    return sum(map(ord, text)) * 31 % 97 / 97


async def slow(text: str, least: float, most: float) -> float:
    await asyncio.sleep(least + (most - least) * score(text))
    return score(text)
'''


def length_shares() -> list[float]:
    """Probability of each length from 1 to STATES; what is beyond is cut there."""
    below = [0.5 * math.erfc(-math.log((n + 0.5) / MEDIAN) / SIGMA / math.sqrt(2)) for n in range(1, STATES)]
    edges = [0.0, *below, 1.0]
    return [after - before for before, after in itertools.pairwise(edges)]


def hazards() -> Iterator[float]:
    """Probability that a sample of length n ends there, having come so far; n from 1."""
    left = 1.0
    for share in length_shares():
        yield min(1.0, share / max(left, 1e-12))
        left -= share


def mean_length() -> float:
    return sum(n * share for n, share in enumerate(length_shares(), 1))


def logits(vocabulary: dict[str, int]) -> list[list[float]]:
    """Log-probability of each token after each."""
    states = [vocabulary[chr(FIRST + n)] for n in range(STATES)]
    rows = [[NEVER] * len(vocabulary) for _ in vocabulary]
    rows[vocabulary[START]][states[0]] = 0.0
    for n, ends in enumerate(hazards()):
        last = n == STATES - 1
        rows[states[n]][vocabulary[END]] = 0.0 if last else math.log(max(ends, 1e-9))
        if not last:
            rows[states[n]][states[n + 1]] = math.log(max(1 - ends, 1e-9))
    return rows


def make_folder(home: Path) -> None:
    """model, train.jsonl and tailed.py."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "tailed.py").write_text(REWARDS, encoding="utf-8")
    rng = random.Random(SEED)
    rows = [
        {"prompt": "".join(chr(FIRST + rng.randrange(STATES)) for _ in range(PROMPT)) + START} for _ in range(N_ROWS)
    ]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_model(home / "model")


def make_model(folder: Path) -> None:
    """See the module."""
    import torch

    characters = "".join(chr(FIRST + n) for n in range(STATES)) + START
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "head_dim": 32}
    model, vocabulary = character_model(
        folder, characters, END, **sizes, max_position_embeddings=512, tie_word_embeddings=False
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(HIDDEN)[: len(vocabulary)])
        model.lm_head.weight.zero_()  # the last norm makes the one of each embedding the root of its width
        model.lm_head.weight[:, : len(vocabulary)] = torch.tensor(logits(vocabulary)).T / math.sqrt(HIDDEN)
    model.save_pretrained(folder)


def is_long_tailed(lengths: Sequence[int]) -> bool:
    """True where the longest is so many times as long as the median."""
    return max(lengths) >= LEAST_RATIO * statistics.median(lengths)
