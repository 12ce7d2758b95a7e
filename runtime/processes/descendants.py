"""All that this process has started, and what that started in turn: adopted, counted, and killed whole.

On Linux; elsewhere a child and its process group alone. A daemon leaves its parent, its session and its process group,
but not its ancestors: where one of those has said `adopt_orphans`, the kernel gives it every descendant whose parent
has ended. So nothing is left once no child is left. Imports nothing of ours and nothing heavy: the smallest of our
processes use it.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator

_PR_SET_CHILD_SUBREAPER = 36
_MAX_PAUSE_SECONDS = 0.05


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(errno)}")


def count_descendants() -> int:
    """Processes below this one, zombies included."""
    children: dict[int, list[int]] = {}
    for pid in _numbers():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    n_descendants, level = 0, children.get(os.getpid(), [])
    while level:
        n_descendants += len(level)
        level = [below for pid in level for below in children.get(pid, [])]
    return n_descendants


def newest_number() -> int:
    """The number that the newest process or thread got: what it grows by bounds how many have been started."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[4])


def kill_descendants(spare: Collection[int] = (), seconds: float = float("inf")) -> None:
    """Kill and reap every descendant except the children `spare` and what is below them; returns when none is left.

    Meant for a process that adopts orphans. What the kernel does not let go of is waited for, `seconds` at most; what
    belongs to another user now can't be killed and is left.
    """
    deadline, pause = time.monotonic() + seconds, 0.0
    while not is_childless() and _kill_once(spare) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(_MAX_PAUSE_SECONDS, pause + 0.001)


def _kill_once(spare: Collection[int]) -> int:
    """One pass over all processes in the order of their numbers; returns how many there were to be killed.

    Each is killed where it is found, and a pass goes on up to the newest number there is by then: what a process has
    started before it was killed has a higher number, so the pass overtakes a tree that grows while it is cut down.
    """
    tree, seen, killed = {os.getpid()}, 0, 0
    for pid in _numbers():
        killed += _kill_member(pid, tree, spare)
        seen = max(seen, pid)
    while killed and (newest := newest_number()) > seen:
        for pid in range(seen + 1, newest + 1):
            killed += _kill_member(pid, tree, spare)
        seen = newest
    for pid in tree - {os.getpid()}:
        with contextlib.suppress(ChildProcessError):  # the child of another one, until that one has ended
            os.waitpid(pid, os.WNOHANG)
    return killed


def _kill_member(pid: int, tree: set[int], spare: Collection[int]) -> bool:
    """Add `pid` to `tree` and kill it where its parent is in `tree`; whether it was there to be killed."""
    try:
        handle = os.pidfd_open(pid)  # from here on the number can't come to mean another process
    except OSError:  # it has ended, or is a thread
        return False
    try:
        if pid in spare or _parent(pid) not in tree:
            return False
        tree.add(pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended; or it is another user's by now
        return False
    finally:
        os.close(handle)
    return True


def is_childless() -> bool:
    """True where this process has no child, not even one that has ended and was not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def reap_with_group(pid: int, options: int) -> int | None:
    """Reap a child that has ended, and kill what its group has left; its exit code, or -N. None: it has not ended.
    options: WNOHANG, or 0 to wait for it."""
    if hasattr(os, "waitid"):  # not on macOS before Python 3.13
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) is None:
            return None
        kill_group(pid)  # while the zombie still keeps its number from being used again
    ended, status = os.waitpid(pid, options)
    if not ended:
        return None
    if not hasattr(os, "waitid"):
        kill_group(pid)  # where any of it is left, that keeps the number
    return os.waitstatus_to_exitcode(status)


def kill_group(leader: int) -> None:
    """Kill the process group that a child of ours leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet, or (macOS) only zombies are in it
        os.killpg(leader, signal.SIGKILL)


def _numbers() -> Iterator[int]:
    """The processes there are, in rising order."""
    with os.scandir("/proc") as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdigit())


def _parent(pid: int) -> int | None:
    """The parent's number; None where the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None
