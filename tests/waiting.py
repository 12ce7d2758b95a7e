"""Waiting in tests for what another thread or process does, with an end."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """False where `holds` has not become true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
