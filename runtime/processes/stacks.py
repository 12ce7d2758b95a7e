"""The stacks of workers that are late: asked of a fleet, read from a file, and shown as the few frames that matter.

A worker writes them by faulthandler, from a signal handler: also where its interpreter is stuck. One that is stopped
writes none; nothing here waits for it for long.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.processes.launcher import Fleet, WorkerStacks
from realgraph.runtime.wire.protocol import Failed

DUMP_SECONDS = 2.0  # for a worker to begin to write its stacks
_QUIET_SECONDS = 0.2  # after which what it has written is all
_LOOK_SECONDS = 0.02
_MOST_BYTES = 200_000  # of one worker's stacks
_SHOWN_FRAMES, _SHOWN_GROUPS, _WRITTEN_WORKERS = 6, 3, 4
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')
# Innermost frames of threads that wait for work, and the files of those that do it, by how much they tell.
_IDLE = {("selectors.py", "select"), ("thread.py", "_worker"), ("compute.py", "_serve")}
_AT_WORK = ("runtime/worker/compute.py", "runtime/worker/function_calls.py", "runtime/generate/engine.py")


class Frame(Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: str
    function: str

    @property
    def text(self) -> str:
        """`rewards.py:34 in score`, with the whole path."""
        return f"{self.file}:{self.line} in {self.function}"


def stacks_file(log: Path) -> Path:
    """The file beside a worker's log that its stacks are appended to: `worker-0.stacks.txt`."""
    return log.with_name(f"{log.stem}.stacks.txt")


def size_of(file: Path) -> int:
    """Its bytes; 0 where it is not there."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def forget_empty(file: Path) -> None:
    """Remove a file that nothing was written to. One that can't be removed does no harm."""
    with contextlib.suppress(OSError):
        if not file.stat().st_size:
            file.unlink()


async def written_since(file: Path, before: int) -> str:
    """The text that a file gets beyond that size, once it has come to rest; '' where none comes in DUMP_SECONDS."""
    first = time.monotonic()
    size, changed = before, first
    while (now := time.monotonic()) - changed < (_QUIET_SECONDS if size > before else DUMP_SECONDS):
        if now - first > 2 * DUMP_SECONDS:
            break
        await asyncio.sleep(_LOOK_SECONDS)
        if (found := size_of(file)) != size:
            size, changed = found, time.monotonic()
    if size <= before:
        return ""
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read(_MOST_BYTES).decode("utf-8", "replace")


def why_silent(pid: int) -> str:
    """The reason for which a process writes no stacks."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        if state in "Tt":
            return "it is stopped (SIGSTOP, or a debugger)"
        if state == "D":
            return "it waits in the kernel, for a disk, a file server or a driver"
    return f"it wrote none within {DUMP_SECONDS:g} s"


async def stacks_of(fleet: Fleet, workers: Sequence[int]) -> tuple[WorkerStacks, ...]:
    """The stacks of those workers that have not ended, asked for at once."""
    return tuple(await asyncio.gather(*(fleet.dump_stacks(worker) for worker in workers if worker in fleet.running)))


async def with_stacks(failure: Failed, fleet: Fleet, seen: Sequence[WorkerStacks] = ()) -> Failed:
    """The failure with the stacks of who is late: a few frames to be shown, all of them in its details. seen: stacks
    that are known already, of workers that have been ended since."""
    stacks = (*seen, *await stacks_of(fleet, failure.late))
    if not stacks:
        return failure
    parts = [failure.detail.rstrip()] if failure.detail else []
    return replace(failure, frames=tuple(shown(stacks)), detail="\n\n".join([*parts, *written(stacks)]) + "\n")


def threads(text: str) -> list[list[Frame]]:
    """The frames of each thread, innermost first, in what faulthandler has written; the main thread comes last."""
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (frame := _FRAME.match(line)):
            found[-1].append(Frame(*frame.groups()))
    return [frames for frames in found if frames]


def late_thread(text: str) -> list[Frame]:
    """The thread that keeps a worker: one that computes, runs functions or generates, else the main thread."""
    found = threads(text)
    busy = [frames for frames in found if (Path(frames[0].file).name, frames[0].function) not in _IDLE]
    for file in _AT_WORK:
        for frames in busy:
            if any(frame.file.endswith(file) for frame in frames):
                return frames
    return found[-1] if found else []


def _alike(stacks: Sequence[WorkerStacks]) -> list[tuple[list[Frame], list[WorkerStacks]]]:
    """Workers by where they are, the smallest group first: of a collective that one has not joined, that one."""
    groups: dict[tuple[Frame, ...], list[WorkerStacks]] = {}
    for one in stacks:
        if one.text:
            groups.setdefault(tuple(late_thread(one.text)), []).append(one)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1][0].worker))
    return [(list(frames), members) for frames, members in ordered]


def _names(stacks: Sequence[WorkerStacks]) -> str:
    numbers = [str(one.worker) for one in stacks]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers[:8])}{more}"


def shown(stacks: Sequence[WorkerStacks]) -> Iterator[str]:
    """The innermost frames of late workers, alike ones together, as lines."""
    groups = _alike(stacks)
    for frames, members in groups[:_SHOWN_GROUPS]:
        yield f"{_names(members)} {'is' if len(members) == 1 else 'are'} here (most recent call first):"
        yield from (f"  {frame.text}" for frame in frames[:_SHOWN_FRAMES])
    if len(groups) > _SHOWN_GROUPS:
        others = [one for _, members in groups[_SHOWN_GROUPS:] for one in members]
        yield f"{_names(others)}: see the details"
    yield from _without(stacks)


def written(stacks: Sequence[WorkerStacks]) -> Iterator[str]:
    """The whole stacks of late workers as paragraphs; of many that are alike, the first ones'."""
    for _, members in _alike(stacks):
        for one in members[:_WRITTEN_WORKERS]:
            yield f"stacks of worker {one.worker}:\n{one.text.rstrip()}"
        if len(members) > _WRITTEN_WORKERS:
            yield f"{_names(members[_WRITTEN_WORKERS:])}: the same"
    yield from _without(stacks)


def _without(stacks: Sequence[WorkerStacks]) -> Iterator[str]:
    reasons: dict[str, list[WorkerStacks]] = {}
    for one in stacks:
        if not one.text:
            reasons.setdefault(one.missing, []).append(one)
    yield from (f"no stack of {_names(members)}: {reason}" for reason, members in reasons.items())
