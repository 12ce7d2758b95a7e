"""Ctrl-C, SIGTERM and SIGHUP while a run lasts: the first asks for an orderly end, the second demands one."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from realgraph.runtime.processes.early_interrupts import refuse_if_interrupted
from realgraph.runtime.processes.processes import END_SIGNALS

T = TypeVar("T")
SAME_REQUEST_SECONDS = 1.0  # systems send SIGTERM or SIGHUP several times for one end: to a process and to its group


class Interrupted(Exception):
    """The user did not want to wait for this."""


def answered() -> tuple[signal.Signals, ...]:
    """The signals that a master acts on. A SIGHUP that is ignored, as under nohup, stays ignored."""
    return tuple(
        number for number in END_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


def leave_dead_terminal() -> None:
    """Sends nowhere what this process shows, where it went to a terminal that has been closed: no write fails for
    it."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(null, descriptor)
    os.close(null)


class Interrupts:
    """Counts interrupts while it is entered (in the main thread, inside the event loop), and calls `on_interrupt` with
    each.

    A SIGTERM or SIGHUP within a second of the last interrupt is the same request once more. To enter it raises
    KeyboardInterrupt where there was an interrupt before.
    """

    def __init__(self, on_interrupt: Callable[[int], None]) -> None:
        self.count = 0
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._on_interrupt = on_interrupt
        self._last = float("-inf")
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.getsignal(number) for number in answered()}
        for number in self._before:
            asyncio.get_running_loop().add_signal_handler(number, self._take, number)
        refuse_if_interrupted()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)

    def _take(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            leave_dead_terminal()
        now = time.monotonic()
        repeated = number != signal.SIGINT and now - self._last < SAME_REQUEST_SECONDS
        self._last = now
        if repeated:
            return
        self.count += 1
        self.first.set()
        if self.count > 1:
            self.second.set()
        self._on_interrupt(self.count)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises Interrupted, with `work` cancelled and over, where `event` is set before it ends."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Interrupted
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
