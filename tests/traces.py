"""Traces of a run while it lives: processes, ports, shared memory; all are gone when the run has ended. Linux."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.namespaces import mounts, show

SHARED = Path("/dev/shm")


def processes_at(home: Path) -> list[int]:
    """Processes, zombies left out, that hold a file under `home` open."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and int(entry.name) != os.getpid()
        and any(file.startswith(f"{home}/") for file in open_files(entry))
    ]


def open_files(process: Path) -> list[str]:
    """Names of the files and sockets that a process, a folder of /proc, has open; none of one that has ended or is
    another user's. A descriptor that it closes meanwhile hides no other."""
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for descriptor in list((process / "fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(descriptor))
    return found


def title_of(pid: int) -> str:
    """The command line of a process, as `ps` shows it; '' where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent_of(pid: int) -> int:
    """0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descends(pid: int, ancestor: int) -> bool:
    """True where a process is another one, or has been started by it or by one of its children."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = parent_of(pid)
    return False


def listening(pids: Sequence[int]) -> set[str]:
    """Local TCP addresses, as the kernel writes them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        inodes |= {name[8:-1] for name in open_files(Path(f"/proc/{pid}")) if name.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def all_listening() -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A"}


@dataclass(frozen=True)
class SharedMemory:
    """Names that some processes give to shared memory: in a /dev/shm of their own, which is a folder elsewhere, or in
    everybody's."""

    folder: Path
    before: frozenset[str]  # names that were there

    def left(self) -> set[str]:
        """Those that have come since, and in everybody's those of this user that no process has any more."""
        new = {name for name in self._names() - self.before if (self.folder / name).is_file()}
        return _held_by_none(new) & self._names() if self.folder == SHARED else new

    def _names(self) -> set[str]:
        return set(os.listdir(self.folder))


def shared_memory(home: Path) -> SharedMemory:
    """The shared memory of processes that will enter that of `home`."""
    folder = SHARED
    if mounts():
        folder = own_shared_memory(home)
        folder.mkdir(exist_ok=True)
    return SharedMemory(folder, frozenset(os.listdir(folder)))


def own_shared_memory(home: Path) -> Path:
    return home / "shared-memory"


def enter_shared_memory(home: Path) -> None:
    """From here on, what this process and its children name in shared memory is in that of `home`, where it has one."""
    if own_shared_memory(home).is_dir():
        show(str(own_shared_memory(home)), at=str(SHARED))


def _held_by_none(names: set[str]) -> set[str]:
    """Those of this user's that no other process has mapped or open: tests beside this one use theirs."""
    names = {name for name in names if _owner(SHARED / name) == os.geteuid()}
    for entry in Path("/proc").glob("[0-9]*"):
        if not names:
            break
        if int(entry.name) == os.getpid():
            continue
        try:
            held = (entry / "maps").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        held += "".join(f"{name}\n" for name in open_files(entry))
        names -= {name for name in names if f"{SHARED}/{name}\n" in held}
    return names


def _owner(file: Path) -> int:
    """-1 where it is gone."""
    try:
        return file.stat().st_uid
    except FileNotFoundError:
        return -1


@dataclass
class Traces:
    """Processes, ports and shared memory that a run holds while it lives, to be gone when it has ended."""

    home: Path
    shared: SharedMemory
    ports: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Note the ports that the run's processes listen on now."""
        self.ports |= listening(processes_at(self.home))
        assert self.ports, "the run listens nowhere: the test looks in the wrong place"

    def gone(self, seconds: float = 5.0) -> None:
        """Wait until no process and no port is left, and no shared memory of nobody; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            left = processes_at(self.home), self.ports & all_listening(), self.shared.left()
            if not any(left):
                return
            assert time.monotonic() < deadline, f"left behind: processes, ports, shared memory: {left}"
            time.sleep(0.02)


def traces(home: Path) -> Traces:
    """The traces of a run that has not started yet."""
    return Traces(home, shared_memory(home))
