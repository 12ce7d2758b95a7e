"""The GPU compiler: kernels are defined while SGLang is imported, and a CPU runs none of them."""

import importlib
from collections.abc import Callable
from typing import Any

from absent import stand_in  # type: ignore[import-not-found]  # beside this file, on the server's path

__version__ = "3.4.0"
stand_in(__name__)


def jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """`@jit` and `@jit(...)`: the function as it is, which can't be launched."""
    return function or _unchanged


def autotune(*configurations: object, **options: object) -> Any:
    """`@autotune(...)`."""
    return _unchanged


heuristics = autotune


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _constexpr(value: object) -> object:
    return value


def _never_called(hook: object) -> None:
    """No kernel is loaded, so a hook of loads is never called."""


importlib.import_module(f"{__name__}.language").__dict__["constexpr"] = _constexpr
importlib.import_module(f"{__name__}.knobs.runtime.kernel_load_start_hook").__dict__["add"] = _never_called
