"""Death at the n-th file operation of a process: opening to write, writing out, renaming, linking, removing, making."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate")
_AT_ANY_TIME = ("status.json", ".status.json.partial")  # written by the clock, of no use to a run that goes on
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class CrashPoints:
    """Counts this process's file operations from `install` on, and kills it just before number `at` (from 1).

    root: only files below it count, as far as an operation says where it is. loses: what was written and not synced is
    cut in half first, as where the power fails. A hook of the interpreter can't be taken out again: for a process that
    was made to die.
    """

    def __init__(self, at: int, root: Path, loses: bool = False) -> None:
        self._at, self._root, self._loses = at, f"{root}/", loses
        self._unsynced: set[str] = set()
        self.count = 0

    def install(self) -> None:
        """Count operations from here on."""
        self._pid = os.getpid()
        os.fsync = self._fsync  # type: ignore[assignment]  # of descriptors alone
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Processes that are forked from this one have the hook too; they go on."""
        if os.getpid() != self._pid:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, str) and flags & _WRITES and path.startswith(self._root) and self._here(path):
                self._operation()
                self._unsynced.add(path)
        elif event in CHANGES and self._here(args[0]):
            self._operation()
            if event == "os.rename":
                moved = {path for path in self._unsynced if path == args[0] or path.startswith(f"{args[0]}/")}
                self._unsynced -= moved
                self._unsynced |= {f"{args[1]}{path[len(str(args[0])) :]}" for path in moved}

    def _here(self, path: Any) -> bool:
        """A name without a folder is one of a folder that is being removed."""
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        here = isinstance(name, str) and (name.startswith(self._root) or not name.startswith("/"))
        return here and os.path.basename(name) not in _AT_ANY_TIME

    def _fsync(self, descriptor: Any) -> None:
        """Note a sync and do nothing: what a sync is for is modelled, and the disk of a test is spared."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self._root) and os.getpid() == self._pid:
            self._operation()
        self._unsynced.discard(path)

    def _operation(self) -> None:
        self.count += 1
        if self.count == self._at:
            if self._loses:
                for name in self._unsynced:
                    if os.path.isfile(name):
                        os.truncate(name, os.path.getsize(name) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
