"""Logs of workers whose host does not see the run directory: whole on that host, their ends in the run directory."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from realgraph.runtime.job.run_folder import disk_text, private
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot

_log = logging.getLogger(__name__)

RELAYED_LINES = 200  # the end of a log, which an agent sends when its worker has ended


def own_logs(boots: Sequence[WorkerBoot]) -> tuple[tuple[WorkerBoot, ...], str]:
    """The workers with logs in a new folder of this host, for its owner alone; and that folder. Raises LaunchError."""
    run = Path(boots[0].log).parent.parent.name
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"realgraph-{run}-"))
    except OSError as error:
        raise LaunchError(f"no folder for logs can be made: {error.strerror or error}") from None
    return tuple(replace(boot, log=str(folder / Path(boot.log).name)) for boot in boots), str(folder)


def record_place(log: Path, host: str, folder: str) -> None:
    """In the run directory, where a log would be: where it is."""
    add_lines(
        log, f"--- from here on the log is on {host}: {folder}/{log.name}; its end follows when its worker ends\n"
    )


def add_lines(log: Path, lines: str) -> None:
    """Append to a log of the run directory. That the disk takes none ends no run: whoever can't go on says so."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8", opener=private) as file:
            file.write(lines)
    except OSError as error:
        _log.warning("the end of a log was not kept: %s", disk_text(error))
