"""Seconds in which this process ran: those for which it was stopped (Ctrl-Z, a suspended job) do not count."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LOOK_SECONDS = 0.25
STOPPED_SECONDS = 1.5  # an event loop that looks at the clock no sooner has been stopped, or might as well have been


class Clock:
    """Monotonic seconds without those between two looks that lie too far apart. `tick` sees to regular looks."""

    def __init__(self) -> None:
        self.stopped_seconds = 0.0  # so far
        self._looked = time.monotonic()

    def now(self) -> float:
        """Seconds, from any beginning."""
        real = time.monotonic()
        gap, self._looked = real - self._looked, real
        if gap > STOPPED_SECONDS:
            self.stopped_seconds += gap
        return real - self.stopped_seconds

    async def tick(self) -> None:
        """Look regularly; a task for as long as the clock is used."""
        while True:
            self.now()
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError where the body takes more than `seconds` in which this process runs."""
    async with asyncio.timeout(None) as limit:
        watch = asyncio.create_task(_expire(limit, seconds))
        try:
            yield
        finally:
            watch.cancel()


async def _expire(limit: asyncio.Timeout, seconds: float) -> None:
    clock = Clock()
    end = clock.now() + seconds
    while (left := end - clock.now()) > 0:
        await asyncio.sleep(min(left, LOOK_SECONDS))
    limit.reschedule(asyncio.get_running_loop().time())
