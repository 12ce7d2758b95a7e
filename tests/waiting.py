"""Waiting in tests for what another thread or process does, with an end."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import AnyStr


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """False where `holds` has not become true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def becomes_true(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Raises TimeoutError where `holds` has not become true in time."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


@contextmanager
def killed(process: "subprocess.Popen[AnyStr]") -> Iterator["subprocess.Popen[AnyStr]"]:
    """A process that is killed at the end where it still runs: `with Popen` alone waits for it without end."""
    with process:
        try:
            yield process
        finally:
            process.kill()
