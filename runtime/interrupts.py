"""Ctrl-C and SIGTERM while a run lasts: the first asks for an orderly end, the second demands one."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The user did not want to wait for this."""


class Interrupts:
    """Counts interrupts while it is entered (in the main thread, inside the event loop), and calls `told` with each."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.count = 0
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._told = told

    def __enter__(self) -> "Interrupts":
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _take(self) -> None:
        self.count += 1
        self.first.set()
        if self.count > 1:
            self.second.set()
        self._told(self.count)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises Interrupted, with `work` cancelled and over, where `event` is set before it ends."""
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
