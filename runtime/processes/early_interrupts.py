"""Ctrl-C, SIGTERM and SIGHUP before anything else answers them: they raise KeyboardInterrupt, and are remembered.

A KeyboardInterrupt that strikes inside a destructor or a module's own `except` is lost; what starts later asks here.
"""

import signal
from types import FrameType

_TAKEN: list[int] = []  # signals so far


def raise_interrupts() -> None:
    """From now on, in the main thread. A SIGHUP that is ignored, as under nohup, stays ignored; so does a SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _take)


def refuse_if_interrupted() -> None:
    """Raises KeyboardInterrupt where there was one already."""
    if _TAKEN:
        raise KeyboardInterrupt


def _take(number: int, frame: FrameType | None) -> None:
    _TAKEN.append(number)
    raise KeyboardInterrupt
