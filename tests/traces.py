"""Traces of a run while it lives: processes, ports, shared memory; all are gone when the run has ended. Linux."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def processes_at(home: Path) -> list[int]:
    """Processes, zombies left out, that hold a file under `home` open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if any(link.startswith(f"{home}/") for link in links):
            found.append(int(entry.name))
    return found


def title_of(pid: int) -> str:
    """The command line of a process, as `ps` shows it; '' where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descends(pid: int, ancestor: int) -> bool:
    """True where a process is another one, or has been started by it or by one of its children."""
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
    return False


def listening(pids: Sequence[int]) -> set[str]:
    """Local TCP addresses, as the kernel writes them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def all_listening() -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A"}


@dataclass
class Traces:
    """Processes, ports and shared memory that a run holds while it lives, to be gone when it has ended."""

    home: Path
    shared: set[str]
    ports: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Note the ports that the run's processes listen on now."""
        self.ports |= listening(processes_at(self.home))
        assert self.ports, "the run listens nowhere: the test looks in the wrong place"

    def gone(self, seconds: float = 5.0) -> None:
        """Wait until no process, no port and nothing in /dev/shm is left; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            left = processes_at(self.home), self.ports & all_listening(), set(os.listdir("/dev/shm")) - self.shared
            if not any(left):
                return
            assert time.monotonic() < deadline, f"left behind: processes, ports, shared memory: {left}"
            time.sleep(0.02)


def traces(home: Path) -> Traces:
    """The traces of a run that has not started yet."""
    return Traces(home, set(os.listdir("/dev/shm")))
