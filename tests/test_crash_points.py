"""Checkpoints survive the death of their writer at every file operation, and disks that refuse or damage something."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from realgraph.runtime.commands.actions import Checkpointed
from realgraph.runtime.job.manifest import MANIFEST, damage, seal
from realgraph.runtime.job.run_folder import RunFolder, exclusive
from realgraph.runtime.master.checkpoints import Checkpoints, newest_intact
from realgraph.runtime.master.observer import CheckpointRecord
from realgraph.runtime.master.records import MetricsFile
from tests.crash_points import CrashPoints
from tests.runs import GRPO, Special, finish, home, records, start, write_run

__all__ = ["home"]

SAVES = ((1, -1), (1, 1), (2, 1), (3, 3))  # (step, best step): the only checkpoint is saved again, as the best
PARTS = ("actor/model.safetensors", "actor/optimizer.safetensors", "critic/model.safetensors")


def content(step: int, part: str) -> bytes:
    return f"{part} after {step} steps".encode() * 50


def state(step: int, best: int = -1) -> Checkpointed:
    return Checkpointed(step, {"actor": step, "critic": step}, 8 * step, 8 * step, 0, best_step=best)


def write_parts(partial: Path, step: int) -> None:
    """Write what the workers write."""
    for part in PARTS:
        (partial / part).parent.mkdir(parents=True, exist_ok=True)
        with (partial / part).open("wb") as file:
            file.write(content(step, part))
            file.flush()
            os.fsync(file.fileno())


def save(folder: RunFolder, checkpoints: Checkpoints, step: int, best: int = -1) -> tuple[str, ...]:
    write_parts(folder.partial(step), step)
    return checkpoints.commit(step, folder.partial(step), state(step, best)).warnings


def train(root: Path, first: int = 0) -> None:
    """A run of three checkpoints, from the one of step `first` on."""
    folder = RunFolder(root)
    with exclusive(folder):
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.recover()
        metrics = MetricsFile(folder.metrics)
        for step, best in SAVES:
            if step >= first:
                save(folder, checkpoints, step, best)
                metrics.observe(CheckpointRecord(step, str(folder.checkpoint(step))))
        metrics.close()


def dies(root: Path, at: int, loses: bool) -> bool:
    """True where a run in a process of its own was killed at file operation `at`; it may have ended before."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            CrashPoints(at, root, loses).install()
            train(root)
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def die_everywhere(root: Path, loses: bool) -> None:
    """Runs in folders of their own, `1` killed at its first file operation and so on; the last one ends before."""
    at = 1
    while dies(root / f"{at}", at, loses):
        at += 1


def forked_to_die(root: Path, loses: bool) -> int:
    """`die_everywhere` in an interpreter of its own: forks of this process, with all its modules, would take a minute.

    The number of runs that were killed.
    """
    code = "import sys, pathlib; from tests.test_crash_points import die_everywhere as die;"
    code += "die(pathlib.Path(sys.argv[1]), sys.argv[2] == 'True')"
    command = [sys.executable, "-c", code, str(root), str(loses)]
    subprocess.run(command, cwd=Path(__file__).parent.parent, timeout=240, check=True)
    return len(list(root.iterdir())) - 1


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, True], ids=["killed", "the power fails"])
def test_no_checkpoint_is_lost_whatever_file_operation_is_the_last(
    tmp_path: Path, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    n_killed, resumed = forked_to_die(tmp_path, loses), set()
    for at in range(1, n_killed + 1):
        folder = RunFolder(tmp_path / f"{at}")
        recorded = max((record["step"] for record in records(folder.root, "checkpoint")), default=0)
        with exclusive(folder):
            Checkpoints(folder, 1).recover()
        newest, damaged = newest_intact(folder)
        step = int(newest.name[5:]) if newest is not None else 0
        assert not damaged
        assert step >= recorded, f"operation {at}: the checkpoint of step {recorded} is lost"
        for part in PARTS if newest is not None else ():
            assert newest is not None and (newest / part).read_bytes() == content(step, part)
        left = [path.name for path in folder.checkpoints.glob("*.*")]
        assert not left, left
        resumed.add(step)
        if at % 4:
            continue
        train(folder.root, step)
        assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["best", "step-000003"]
        assert folder.best.resolve() == folder.checkpoint(3).resolve()
    assert resumed == {0, 1, 2, 3}
    assert n_killed > 100


THREE = {"steps": 3, "checkpoint": {"every": 1, "keep": 1}}


def survives(home: Path, name: str, dies_at: int, whole: Path) -> bool:
    """Kill the master of a real run of three checkpoints at a file operation, go on, compare with an untouched run.

    Whether it was killed: it may have ended before. What is on record as saved is never trained again.
    """
    file = write_run(home, name, GRPO, THREE)
    run = start(home, "run", str(file), name=name, special=Special(dies_at=dies_at))
    code = run.wait()
    assert code in (0, -signal.SIGKILL), run.output()
    recorded = max((record["step"] for record in records(home / name, "checkpoint")), default=0)
    if code and recorded < 3:
        first = ["--resume", str(home / name)] if any((home / name).glob("checkpoints/step-*")) else None
        if first is not None and (recorded or complete(home / name)):
            finish(home, "run", *first, name=name)
            assert records(home / name, "start")[-1]["first_step"] >= recorded
        else:
            shutil.rmtree(home / name)
            finish(home, "run", str(file), name=name)
    last = "checkpoints/step-000003/actor/model.safetensors"
    assert (home / name / last).read_bytes() == (whole / last).read_bytes()
    shutil.rmtree(home / name)
    return code != 0


def complete(folder: Path) -> bool:
    """True where there is a checkpoint to go on from, under whatever name."""
    return any(not damage(path) for path in folder.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_a_real_run_goes_on_after_its_master_died_at_a_file_operation(home: Path) -> None:
    """Some operations of the first saves; all of them are benchmarks/crash_points.py."""
    finish(home, "run", str(write_run(home, "three", GRPO, THREE)), name="three")
    for dies_at in random.Random(0).sample(range(20, 60), 2):
        assert survives(home, "dying", dies_at, home / "three")


def test_a_checkpoint_that_can_not_be_removed_is_a_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = RunFolder(tmp_path), shutil.rmtree
    checkpoints = Checkpoints(folder, keep=1)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    assert not save(folder, checkpoints, 1)
    monkeypatch.setattr(shutil, "rmtree", busy)
    (warning,) = save(folder, checkpoints, 2)
    assert "was not removed, which is tried again: Device or resource busy" in warning
    assert str(folder.checkpoints / "step-000001") in warning
    assert folder.steps() == [2]
    assert len(save(folder, checkpoints, 3)) == 1, "each is named once"
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert not save(folder, checkpoints, 4)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000004"]


def refuse_renames(monkeypatch: pytest.MonkeyPatch, suffix: str, number: int) -> None:
    """Renames from and to names with this suffix fail with this error."""
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if suffix in (Path(source).suffix, Path(target).suffix):
            raise OSError(number, os.strerror(number), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)


def test_a_checkpoint_that_is_in_use_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can't even be renamed, like a mount point, stays whole."""
    folder = RunFolder(tmp_path)
    checkpoints = Checkpoints(folder, keep=1)
    save(folder, checkpoints, 1)
    refuse_renames(monkeypatch, ".removed", errno.EBUSY)
    assert len(save(folder, checkpoints, 2)) == 1
    assert folder.steps() == [1, 2]
    assert not damage(folder.checkpoint(1))
    monkeypatch.undo()
    save(folder, checkpoints, 3)
    assert folder.steps() == [3]


def test_a_former_checkpoint_is_back_where_the_new_one_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    checkpoints = Checkpoints(folder, keep=1)
    save(folder, checkpoints, 1)
    refuse_renames(monkeypatch, ".partial", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        save(folder, checkpoints, 1, best=1)
    assert newest_intact(folder) == (folder.checkpoint(1), ())


@pytest.mark.parametrize("part", [*PARTS, "state.json", MANIFEST])
@pytest.mark.parametrize("how", ["a flipped bit", "truncated", "empty", "longer", "gone", "a folder"])
def test_a_damaged_file_is_named_and_its_checkpoint_passed_over(tmp_path: Path, part: str, how: str) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        save(folder, Checkpoints(folder, keep=2), step)
    assert newest_intact(folder) == (folder.checkpoint(2), ())
    file = folder.checkpoint(2) / part
    whole = file.read_bytes()
    match how:
        case "a flipped bit":
            middle = len(whole) // 2
            file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
        case "truncated":
            file.write_bytes(whole[:-7])
        case "empty":
            file.write_bytes(b"")
        case "longer":
            file.write_bytes(whole + b"\0")
        case _:
            file.unlink()
            if how == "a folder":
                file.mkdir()
    newest, (damaged,) = newest_intact(folder)
    assert newest == folder.checkpoint(1)
    assert damaged.path == folder.checkpoint(2)
    assert damaged.reason
    assert part in damaged.reason or part == MANIFEST


def test_damage_is_looked_for_where_it_matters(tmp_path: Path) -> None:
    write_parts(tmp_path, 1)
    seal(tmp_path)
    (tmp_path / "actor/optimizer.safetensors").write_bytes(b"")
    assert "actor/optimizer.safetensors has 0 bytes" in damage(tmp_path)
    assert not damage(tmp_path, "actor/", "actor/optimizer")
    assert not damage(tmp_path, "critic/")
