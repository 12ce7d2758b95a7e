"""The search as a person drives it: Ctrl-C asks for what was found so far, and a terminal shows how far it is."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.status import Status
from rich.text import Text

from realgraph.planner.report.format import gap_text, seconds_text
from realgraph.screen.terminal import Terminal

SHOWN_AFTER_SECONDS = 0.3  # a search that ends before shows nothing


class Progress:
    """The last incumbent and bound, as one line that changes in place. Shows nothing where stderr is no terminal."""

    def __init__(self, console: Terminal) -> None:
        self._status = Status("planning", console=console) if console.is_terminal else None
        self._began, self._shown, self.text = time.monotonic(), False, "planning"

    def report(self, period: float, bound: float) -> None:
        """An incumbent or a bound has improved. Infinite or 0 where there is none yet."""
        incumbent = f"best so far {seconds_text(period)}" if period < float("inf") else "no plan yet"
        proven = f", bound {seconds_text(bound)}" if bound > 0 else ""
        gap = f", gap {gap_text(period / bound - 1)}" if bound > 0 and period < float("inf") else ""
        self.show(f"{incumbent}{proven}{gap} (Ctrl-C takes it)")

    def show(self, text: str) -> None:
        """Any line."""
        self.text = text
        if self._status is None or time.monotonic() - self._began < SHOWN_AFTER_SECONDS:
            return
        self._status.update(Text(text))
        if not self._shown:
            self._shown = True
            self._status.start()

    def close(self) -> None:
        """Clear the line; the next `show` brings it back."""
        if self._status is not None and self._shown:
            self._status.stop()
        self._shown = False


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed: the first asks for an end, the second raises KeyboardInterrupt.

    Only the main thread gets signals: elsewhere it always says False.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
