"""`--lengths`: how many new tokens responses had, from a file or a finished run."""

from pathlib import Path

import msgspec

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.graphs.yaml.files import read_text
from realgraph.planner.request.cost_table import load_costs

MOST_LENGTHS = 10_000_000  # of a file: a few hundred quantiles are kept of them


def read_lengths(path: Path) -> tuple[int, ...]:
    """New tokens of samples, in any order: of a run directory, a JSON list, or a file with one number a line.

    Raises ConfigError with the place of what is no length: a sample has at least one new token, and whole ones.
    """
    if path.is_dir():
        lengths = load_costs(path).lengths
        if not lengths:
            raise _error(path, 0, "the run has recorded no lengths of responses", "a graph that generates records them")
        return lengths
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _error(
            path, 0, f"the lengths can't be read: {reason(error)}", "a file of numbers, or a run directory"
        ) from error
    lengths = _of_json(path, text) if text.lstrip().startswith("[") else _of_lines(path, text)
    if not 0 < len(lengths) <= MOST_LENGTHS:
        raise _error(path, 0, f"{len(lengths):,} lengths: expected 1 to {MOST_LENGTHS:,}", "")
    return lengths


def _of_json(path: Path, text: str) -> tuple[int, ...]:
    try:
        lengths = msgspec.json.decode(text, type=tuple[float, ...])
    except msgspec.MsgspecError as error:
        raise _error(path, 0, f"no JSON list of numbers: {error}", "such as [512, 80, 1033]") from error
    return tuple(_length(Where(str(path), path=f"$[{i}]"), length) for i, length in enumerate(lengths))


def _of_lines(path: Path, text: str) -> tuple[int, ...]:
    lengths = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                lengths.append(_length(Where(str(path), number), float(line)))
            except ValueError:
                raise _error(path, number, f"{line.strip()!r} is no number", "one length in tokens a line") from None
    return tuple(lengths)


def _length(where: Where, length: float) -> int:
    if not 1 <= length < 1 << 31 or not length.is_integer():
        hint = "whole numbers of new tokens, 1 or more: leave out samples that have none"
        raise ConfigError([Problem(where, f"{length:g} is no length in tokens", hint, "lengths")])
    return int(length)


def _error(path: Path, number: int, text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where(str(path), number), text, hint, "lengths")])
