"""Rows of data for a rehearsal: those of the run, or made ones with a column for each input of a graph, by its type."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, OF_DATA, TOKENS, KeyType
from realgraph.rehearsal.models import CHARACTERS
from realgraph.rehearsal.texts import CHOSEN, PROMPT, REJECTED, RESPONSE


def made_rows(graph: Graph, n_rows: int, prompt: int, response: int, seed: int) -> list[dict[str, Any]]:
    """Rows with texts of up to so many characters, which are tokens."""
    draw = random.Random(seed)
    return [_row(graph, draw, prompt, response) for _ in range(n_rows)]


def typical_tokens(graph: Graph, rows: Sequence[dict[str, Any]], longest: int) -> float:
    """Tokens of a sample: the mean of what the rows have; the longest of what is generated, as random weights seldom
    end a response early."""
    from_data = any(key.name == TOKENS and key.type.level != "group" for key in graph.inputs)
    if not from_data or not rows:
        return float(longest)
    names = (RESPONSE, CHOSEN, REJECTED)
    lengths = [len(row[PROMPT]) + len(row[name]) + 1 for row in rows for name in names if name in row]
    return sum(lengths) / len(lengths)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines. Raises OSError."""
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _row(graph: Graph, draw: random.Random, prompt: int, response: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key in graph.inputs:
        if key.name in OF_DATA:
            row[RESPONSE] = _text(draw, response - 1)  # after the row's prompt
            row.setdefault(PROMPT, _text(draw, prompt))
        elif key.name in (TOKENS, MASK) and key.type.level != "group":
            row[PROMPT] = _text(draw, prompt)
            pair = (CHOSEN, REJECTED) if graph.samples_per_group == 2 else (RESPONSE,)
            row |= {name: _text(draw, response - 1) for name in pair}  # the end of the sequence follows
        else:
            row[key.name] = _value(key.type, draw, prompt)
    return row


def _value(kind: KeyType, draw: random.Random, prompt: int) -> Any:
    match kind.dtype:
        case "tokens" | "text":
            return _text(draw, prompt)
        case "bool":
            return draw.random() < 0.5
        case "int32" | "int64":
            return draw.randrange(100)
        case "float32" | "float64":
            return draw.random()
        case "json":
            return {}
        case "experts":
            raise AssertionError("no data have choices of experts")


def _text(draw: random.Random, most: int) -> str:
    return "".join(_characters(draw, draw.randint(1, max(1, most))))


def _characters(draw: random.Random, n: int) -> Iterator[str]:
    yield from draw.choices(CHARACTERS, k=n)
