"""The files of one run: where they lie, and how they are written so that a crash never leaves half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from realgraph.planner.request.cost_table import COSTS_FILE

CHECKPOINT_STATE = "state.json"


class RunFolder(Struct, frozen=True):
    """A run directory. Paths only; nothing is made before it is written."""

    root: Path

    @property
    def lock(self) -> Path:
        """The file that a run holds while it lives."""
        return self.root / ".lock"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def costs(self) -> Path:
        """Seconds that the run's calls took, for the next plan; written at its end."""
        return self.root / COSTS_FILE

    @property
    def transcripts(self) -> Path:
        return self.root / "transcripts.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of a run that only generates: a file a worker."""
        return self.root / "samples"

    @property
    def audit(self) -> Path:
        """Folder of what every loss has used: a file a worker."""
        return self.root / "audit"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def events(self) -> Path:
        """Every event of the Scheduler, to replay."""
        return self.root / "events.log"

    @property
    def status(self) -> Path:
        """The file that says what the run does right now; there while it lives."""
        return self.root / "status.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The whole checkpoint of `step`; it exists only if it is complete."""
        return self.checkpoints / f"step-{step:06d}"

    def partial(self, step: int) -> Path:
        """The folder that the checkpoint of `step` is written to before it is renamed."""
        return self.checkpoints / f"step-{step:06d}.partial"

    @property
    def best(self) -> Path:
        """A link to the checkpoint with the best held-out score."""
        return self.checkpoints / "best"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-*") if path.name[5:].isdigit())

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self.checkpoint(steps[-1]) if steps else None


def fsync_path(path: Path) -> None:
    """Flush a file or folder entry to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file as a whole, durably. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    fsync_path(path.parent)


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at a place of an open file. Raises OSError."""
    while data:
        n = os.pwrite(handle, data, offset)
        data, offset = data[n:], offset + n


def fresh_link(link: Path) -> Path:
    """The path of a link until it replaces `link`."""
    return link.with_name(f".{link.name}.fresh")


def point_link(link: Path, target: Path) -> None:
    """Make `link` name the sibling `target`, atomically."""
    fresh = fresh_link(link)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    os.replace(fresh, link)


@contextmanager
def exclusive(folder: RunFolder) -> Iterator[None]:
    """Hold the run directory: two runs never write to one. Raises BlockingIOError if another run holds it.

    A new one is for its owner alone: it has data and samples as text. One that is there keeps its mode.
    """
    import fcntl

    folder.root.parent.mkdir(parents=True, exist_ok=True)
    folder.root.mkdir(mode=0o700, exist_ok=True)
    with folder.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def in_use(folder: RunFolder) -> bool:
    """True where a run holds the directory (`exclusive`). Changes nothing."""
    import fcntl

    try:
        with folder.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def private(path: str, flags: int) -> int:
    """An `opener`: a new file is for its owner alone, whatever the mode of its folder."""
    return os.open(path, flags, 0o600)


def disk_text(error: OSError) -> str:
    """`No space left on device: /runs/x/metrics.jsonl`, without a number that only means something to programs."""
    if not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
