"""Sliding windows of attention: which layers have one, from the fields of a config.json. Knows no cost."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

# Tokens of a window where a config.json does not say: the defaults of transformers' configuration classes. Where a
# class has `use_sliding_window` (Qwen), it is off by default.
WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128, "qwen2": 4096, "qwen3": 4096}
WINDOWS["qwen3_moe"] = 4096
SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
EVERY_LAYER = ("mistral", "mixtral", "qwen3_moe")  # whose windows are those of all layers, or of none
PERIODS = {"gemma2": 2, "gpt_oss": 2}  # of layers, the last of each has no window
SLIDING = "sliding_attention"  # in `layer_types`


class SlidingWindow(Struct, frozen=True):
    """Layers in which a query sees the last `tokens` tokens, its own included: the numbers of the layers, rising."""

    tokens: int
    layers: tuple[int, ...]


class _Fields(Struct, frozen=True):
    """The fields of a config.json that tell windows."""

    sliding_window: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | None = None


def sliding_window(kind: str, config: Mapping[str, Any], layers: int) -> SlidingWindow | None:
    """The window of a model of so many layers as transformers builds it; None where each layer sees all tokens.

    kind: its architecture, `model_type`. Raises msgspec.ValidationError where a field is not what it should be.
    """
    fields = msgspec.convert(config, _Fields)
    given = WINDOWS.get(kind) if isinstance(fields.sliding_window, UnsetType) else fields.sliding_window
    known = kind in WINDOWS or kind == "mixtral"
    if given is None or not known or (kind in SWITCHED and not fields.use_sliding_window):
        return None
    numbers = tuple(_windowed(kind, fields, layers))
    return SlidingWindow(given, numbers) if numbers else None


def _windowed(kind: str, fields: _Fields, layers: int) -> Iterable[int]:
    if kind in EVERY_LAYER:
        return range(layers)
    if fields.layer_types is not None:
        return (i for i, one in enumerate(fields.layer_types[:layers]) if one == SLIDING)
    if kind in SWITCHED:
        return range(max(0, fields.max_window_layers), layers)
    period = PERIODS.get(kind) or fields.sliding_window_pattern or 6
    return (i for i in range(layers) if (i + 1) % period)
