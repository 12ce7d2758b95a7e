"""The built-in functions of `kind: function` calls: small rewards and filters. Their names: `graphs/functions.py`."""

import math
import re
from collections.abc import Callable, Sequence

from realgraph.graphs.functions import GATHERED

# A sign right after a digit, a Latin letter or a bracket is an operator; commas part thousands, or else numbers.
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z_)\]}])[-+\u2212])?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_WRITTEN = str.maketrans({",": None, "$": None, "\u2212": "-"})


def exact_match(text: str, answer: str) -> float:
    """1.0 where the text, without surrounding space, is the answer."""
    return float(text.strip() == answer.strip())


def final_number(text: str) -> float | None:
    """The last number of a text, thousands separators and dollar signs left out; after `####` where that stands in it
    (the form of GSM8K's answers, arXiv:2110.14168). None where there is no number."""
    _, mark, tail = text.rpartition("####")
    numbers = _NUMBER.findall(tail if mark else text)
    return float(numbers[-1].translate(_WRITTEN)) if numbers else None


def last_number(text: str, answer: str) -> float:
    """1.0 where the last number in the text is the answer's last number; 0.0 where the text has none.

    Raises ValueError where the answer has none: such a row can't be learnt from.
    """
    right = final_number(answer)
    if right is None:
        raise ValueError(f"the answer {answer[:80]!r} holds no number")
    mine = final_number(text)
    return float(mine is not None and math.isclose(mine, right, rel_tol=1e-9, abs_tol=1e-9))


def format_match(text: str, pattern: str) -> float:
    """1.0 where the whole text, without surrounding space, matches the regular expression; `.` matches newlines too."""
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def length(text: str) -> float:
    """Number of characters of the text."""
    return float(len(text))


def fill_template(template: str, prompt: str = "", text: str = "", answer: str = "") -> str:
    """The template with the values of {prompt}, {text} and {answer}; other braces stay as they are."""
    values = {"{prompt}": prompt, "{text}": text, "{answer}": answer}
    return re.sub(r"\{(?:prompt|text|answer)\}", lambda match: values[match[0]], template)


def number_in(text: str, low: float, high: float) -> float:
    """The last number in the text, at least `low` and at most `high`; `low` where there is none."""
    number = final_number(text)
    return low if number is None else min(max(number, low), high)


def best_of(reward: Sequence[float], k: int = 1, least: float = -math.inf) -> list[float]:
    """1.0 for the `k` best samples of a group (the first of equals) whose reward is at least `least`, else 0.0."""
    order = sorted(range(len(reward)), key=lambda i: -reward[i])
    best = {i for i in order[:k] if reward[i] >= least}
    return [float(i in best) for i in range(len(reward))]


def reward_spread(reward: Sequence[float], least: float = 0.0) -> bool:
    """True where the rewards of a group differ by more than `least`: groups that do not teach nothing.

    Source: DAPO's dynamic sampling, arXiv:2503.14476, eq. 11.
    """
    return max(reward) - min(reward) > least


def gathered(**values: object) -> dict[str, object]:
    """The values as they came: to read them has brought them here."""
    return values


FUNCTIONS: dict[str, Callable[..., object]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "format_match": format_match,
    "length": length,
    "fill_template": fill_template,
    "number_in": number_in,
    "best_of": best_of,
    "reward_spread": reward_spread,
    GATHERED: gathered,
}
# Quick whatever they are given, so they need no subprocess; a user's pattern may take for ever.
INLINE = frozenset(FUNCTIONS) - {"format_match"}
