"""Checkpoint folders on disk: made visible at once, replaced and removed so that a crash at any point loses none.

    step-000040           whole; nothing else of this list is ever gone on from
    step-000040.partial   being written; whole once it has its manifest
    step-000040.old       the former one, aside until the new one has its name
    step-000040.removed   on its way out
    step-000040.damaged   found to be damaged, and passed over

A rename is one step for the disk, and is synced before the next thing depends on it. `recover` ends what a crash has
left half done.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from realgraph.runtime.job.manifest import damage
from realgraph.runtime.job.run_folder import RunFolder, fresh_link, fsync_path, point_link


class NotRemoved(OSError):
    """An old checkpoint is still there; `filename` says which. Nothing is lost but room on the disk."""


def commit_folder(partial: Path, final: Path) -> list[NotRemoved]:
    """Make a written folder visible under its final name at once and durably. Returns what could not be removed.

    Where the name is taken, that folder goes aside first and is removed last. Raises OSError, with the former folder
    back in its place.
    """
    fsync_path(partial)
    former = None
    if final.exists():
        former = _free(final, "old")
        _rename(final, former)
    try:
        _rename(partial, final)
    except OSError:
        if former is not None:
            _rename(former, final)
        raise
    return list(_remove(former)) if former is not None else []


def prune(folder: RunFolder, keep: int) -> list[NotRemoved]:
    """Remove all but the `keep` newest checkpoints, never the best, and what earlier tries have left.

    Returns what could not be removed.
    """
    best = folder.best.resolve() if folder.best.is_symlink() else None
    replaced = [path for path in _asides(folder, "old") if _named(path).exists()]
    failures = [failure for path in (*_asides(folder, "removed"), *replaced) for failure in _remove(path)]
    for step in folder.steps()[:-keep]:
        path = folder.checkpoint(step)
        if path.resolve() != best:
            failures += _discard(path)
    return failures


def recover(folder: RunFolder) -> list[NotRemoved]:
    """After any end: put back what is aside, make whole what is written in full, remove the rest.

    Nobody may be writing a checkpoint. Returns what could not be removed. Raises OSError.
    """
    failures: list[NotRemoved] = []
    fresh_link(folder.best).unlink(missing_ok=True)
    for path in _asides(folder, "old"):
        if _named(path).exists():
            failures += _remove(path)
        else:
            _rename(path, _named(path))
    for path in _asides(folder, "partial"):
        if _named(path).exists() or damage(path):
            failures += _remove(path)
        else:
            _rename(path, _named(path))
    return failures + list(chain.from_iterable(map(_remove, _asides(folder, "removed"))))


def set_aside(checkpoint: Path) -> Path:
    """Take a damaged checkpoint out of the way. Returns where it is now. Raises OSError."""
    target = _free(checkpoint, "damaged")
    _rename(checkpoint, target)
    return target


def point_best(folder: RunFolder, step: int) -> None:
    """Have `best` name the checkpoint of `step`, where that is there. Raises OSError."""
    target = folder.checkpoint(step)
    if target.is_dir() and (not folder.best.is_symlink() or os.readlink(folder.best) != target.name):
        point_link(folder.best, target)
        fsync_path(folder.checkpoints)


def _asides(folder: RunFolder, ending: str) -> list[Path]:
    """`step-000040.<ending>` and `step-000040.<ending>-2` of all steps, the last of each step first."""
    asides = folder.checkpoints.glob(f"step-*.{ending}*")
    return sorted(asides, key=lambda path: (len(path.name), path.name), reverse=True)


def _named(aside: Path) -> Path:
    """The checkpoint that this one is or was."""
    return aside.with_name(aside.name.partition(".")[0])


def _free(path: Path, ending: str) -> Path:
    """`<path>.<ending>`, with a number where an earlier one could not be removed."""
    numbers = chain([""], (f"-{number}" for number in count(2)))
    names = (path.with_name(f"{path.name}.{ending}{number}") for number in numbers)
    return next(name for name in names if not name.exists())


def _discard(path: Path) -> Iterator[NotRemoved]:
    """Remove a checkpoint, so that half of it is never found under its name."""
    target = _free(path, "removed")
    try:
        _rename(path, target)
    except OSError as error:
        yield _not_removed(path, error)
    else:
        yield from _remove(target)


def _remove(path: Path) -> Iterator[NotRemoved]:
    try:
        shutil.rmtree(path)
    except OSError as error:
        yield _not_removed(path, error)


def _not_removed(path: Path, error: OSError) -> NotRemoved:
    return NotRemoved(error.errno or errno.EIO, error.strerror or str(error), str(path))


def _rename(source: Path, target: Path) -> None:
    """Rename within a folder, durably. Raises OSError."""
    os.rename(source, target)
    fsync_path(target.parent)
