"""Files that grow as long as a run does: a full one becomes `<name>.1.<ending>`, the one before it is forgotten."""

import contextlib
import os
import shutil
from collections import deque
from pathlib import Path

from realgraph.runtime.job.run_folder import private

MEGABYTE = 10**6


def older(path: Path) -> Path:
    """The path that a full file moves to: `trace.1.json`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def last_lines(path: Path, n_lines: int) -> str:
    """The end of a file and of the one before it; '' where there is none yet."""
    last: deque[str] = deque(maxlen=n_lines)
    for each in (older(path), path):
        with contextlib.suppress(FileNotFoundError), each.open(encoding="utf-8", errors="replace") as lines:
            last.extend(lines)
    return "".join(last)


def limit_log(path: Path, most_bytes: int) -> bool:
    """Empty a full file that processes append to through descriptors of their own (O_APPEND), after a copy.

    What they write between the copy and the cut is lost. Returns whether it was full. Raises OSError where it could
    not be copied; it is cut all the same, for it may be what has filled the disk.
    """
    try:
        if path.stat().st_size < most_bytes:
            return False
    except FileNotFoundError:
        return False
    try:
        with path.open("rb") as source, open(older(path), "wb", opener=private) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError:
        older(path).unlink(missing_ok=True)
        raise
    finally:
        os.truncate(path, 0)
    return True
