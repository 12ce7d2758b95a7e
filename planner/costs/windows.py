"""Tokens that a query sees in layers with and without a sliding window, and stages with other shares of such layers.

Exact counts of a causal mask, in which a query at position t sees min(t, window) tokens; positions are taken to be
continuous, as everywhere in the cost formulas. Knows no seconds.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct

from realgraph.planner.costs.lengths import Lengths
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import Stages
from realgraph.planner.plan.stages import layer_ranges


class Seen(Struct, frozen=True):
    """Tokens that a query sees, mean over the queries of a pass: in the mean layer, in one without a window, and in one
    with the model's."""

    mean: float
    full: float
    windowed: float


def mean_seen(tokens: float, window: float = math.inf) -> float:
    """Tokens of its own sequence that a query sees, mean over the positions of a sequence of so many `tokens`."""
    return tokens / 2 - max(0.0, tokens - window) ** 2 / (2 * tokens) if tokens > 0 else 0.0


def mean_context(prompt: float, responses: Lengths, window: float = math.inf) -> float:
    """Tokens of its own sample that a token attends to, mean over the tokens of samples of a prompt and a response.

    A sample of n tokens has n of them, which attend to n / 2 on average: E[n^2] / 2 E[n]. A window hides the square of
    those beyond it: E[max(0, n - window)^2] / 2 E[n] less.
    """
    squared = prompt * prompt + 2 * prompt * responses.mean + responses.second_moment
    hidden = _squared_excess(responses, window - prompt) if window < prompt + responses.longest else 0.0
    return (squared - hidden) / (2 * (prompt + responses.mean))


_squared_excess = lru_cache(maxsize=256)(Lengths.squared_excess)


def seen_by(setting: Setting, tokens: Callable[[float], float]) -> Seen:
    """tokens: those that a query sees under a window of so many, the mean over queries.

    Attention that writes all scores down computes those too that a window hides.
    """
    window, full = window_of(setting), tokens(math.inf)
    if window == math.inf or setting.engine.attention == "unfused":
        return Seen(full, full, full)
    windowed = tokens(window)
    return Seen(full - windowed_share(setting.model) * (full - windowed), full, windowed)


def window_of(setting: Setting) -> float:
    """Tokens of the window that saves an engine work; CPU engines compute under masks."""
    masked = setting.masks_windows or setting.cluster.is_cpu
    return math.inf if setting.model.window is None or masked else float(setting.model.window.tokens)


def windowed_share(model: ModelSpec) -> float:
    """Share of the layers that have a window."""
    return len(model.window.layers) / model.layers if model.window is not None else 0.0


@lru_cache(maxsize=1 << 10)
def fewer_windowed(model: ModelSpec, stages: Stages) -> tuple[float, ...]:
    """Windowed layers that each stage has fewer than its layers would have at the model's share; () where none has."""
    if model.window is None:
        return ()
    share, windowed = windowed_share(model), set(model.window.layers)
    fewer = [
        sum(share * len(chunk) - len(windowed.intersection(chunk)) for chunk in chunks)
        for chunks in layer_ranges(stages)
    ]
    return tuple(fewer) if any(abs(one) > 1e-9 for one in fewer) else ()
