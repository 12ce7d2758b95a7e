"""The first search on a machine compiles its inner loops, once: say so where somebody waits for it."""

import threading
import time

from realgraph.screen.output import say

PATIENCE_SECONDS = 2.0  # of processor time: loading what is compiled already takes less, however busy the machine is
LOOK_SECONDS = 0.25


def prepare_search() -> None:
    """Bring the search's machine code into memory; a line on stderr where that takes a while."""
    from realgraph.planner.solve.warm import warm

    ended = threading.Event()
    threading.Thread(target=_say_if_slow, args=(time.process_time(), ended), daemon=True).start()
    try:
        warm()
    finally:
        ended.set()


def _say_if_slow(began: float, ended: threading.Event) -> None:
    while not ended.wait(LOOK_SECONDS):
        if time.process_time() - began > PATIENCE_SECONDS:
            say("compiling the planner's search for this machine, once: about 20 seconds", err=True)
            return
