"""Ctrl-C, SIGTERM and SIGHUP before anything else answers them: they raise KeyboardInterrupt, and are remembered.

A KeyboardInterrupt that strikes inside a destructor is lost: it is raised again a moment later. One that a module's own
`except` takes is lost too: what starts later asks here.
"""

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_SECONDS = 0.01  # from a lost interrupt to its return, which the destructor that lost it has left by then
_TAKEN: list[int] = []  # signals so far


def raise_interrupts() -> None:
    """Raise interrupts in the main thread. A SIGHUP that is ignored, as under nohup, stays so, and so does a SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _take)
    sys.unraisablehook = _raise_again


def refuse_if_interrupted() -> None:
    """Raises KeyboardInterrupt where there was one already."""
    if _TAKEN:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def _take(number: int, frame: FrameType | None) -> None:
    _TAKEN.append(number)
    raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _raise_again(lost: "UnraisableHookArgs") -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _raise)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(lost)
