"""The console script, and `python -m realgraph`: an interrupt while the command line is still being loaded is no
traceback either."""

import sys

from realgraph.runtime.processes.early_interrupts import raise_interrupts


def main() -> None:
    """Load the command line and run it. Ctrl-C, SIGTERM and SIGHUP end it with 130."""
    try:
        raise_interrupts()
        from realgraph.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
