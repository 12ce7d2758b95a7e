"""The first search on a machine compiles its inner loops, once: say so where somebody waits for it."""

import threading

from rich.console import Console

PATIENCE_SECONDS = 2.0  # loading what is compiled already takes less


def prepare_search() -> None:
    """Bring the search's machine code into memory; a line on stderr where that takes a while."""
    from realgraph.planner.solve.warm import warm

    text = "compiling the planner's search for this machine, this once: some 20 seconds"
    note = threading.Timer(PATIENCE_SECONDS, Console(stderr=True, highlight=False).print, [text])
    note.daemon = True
    note.start()
    try:
        warm()
    finally:
        note.cancel()
