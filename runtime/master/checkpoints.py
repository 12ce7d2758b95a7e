"""Whole checkpoints: the workers' parts and the Scheduler's state under one name, or nothing. Master side."""

import asyncio
import math
from collections.abc import Collection, Iterable
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.spec import Train
from realgraph.runtime.commands.actions import STATE_FORMAT, Checkpointed, CheckpointedWithTask
from realgraph.runtime.commands.failures import workers_text
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.manifest import damage, seal
from realgraph.runtime.job.run_folder import CHECKPOINT_STATE, RunFolder, disk_text, write_atomic
from realgraph.runtime.master.checkpoint_folders import NotRemoved, commit_folder, point_best, prune, recover
from realgraph.runtime.master.inbox import Inbox
from realgraph.runtime.master.startup import WorkerGroup
from realgraph.runtime.wire.protocol import RESCUE_CALL, Done, Failed, Rescue
from realgraph.runtime.wire.sockets import TransportError

FIRST_RESCUE_TASK = -1  # of a rescue, and one less for each that begins anew: no task of the Scheduler has these


class Committed(Struct, frozen=True):
    """A checkpoint that is whole, and what is to be said about older ones."""

    path: Path
    warnings: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._warned: set[str | None] = set()

    def recover(self) -> tuple[str, ...]:
        """End what a crash or a failure has left half done. Nobody may be writing a checkpoint. Raises OSError."""
        return self._warnings(recover(self._folder))

    def newest_step(self) -> int:
        """Completed steps of the newest whole checkpoint, 0 if there is none."""
        return max(self._folder.steps(), default=0)

    def partial(self, step: int) -> Path:
        """The folder for the parts of a checkpoint that begins anew. Raises OSError.

        Where one that was cut off is still being written to, the same bytes go to the same places once more.
        """
        path = self._folder.partial(step)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int, partial: Path, state: Checkpointed) -> Committed:
        """Add the state and the checksums, make the folder whole, mark the best, remove old ones. Raises OSError.

        The new one is safe before an old one is touched: that one can't be removed is a warning, and tried again.
        """
        write_atomic(partial / CHECKPOINT_STATE, msgspec.json.format(msgspec.json.encode(state)))
        seal(partial)
        final = self._folder.checkpoint(step)
        failures = commit_folder(partial, final)
        point_best(self._folder, state.best_step)
        failures += prune(self._folder, self._keep)
        return Committed(final, self._warnings(failures))

    def _warnings(self, failures: Iterable[NotRemoved]) -> tuple[str, ...]:
        """A line for each that was not named before."""
        new = [failure for failure in failures if failure.filename not in self._warned]
        self._warned.update(failure.filename for failure in new)
        return tuple(f"an old checkpoint was not removed, which is tried again: {disk_text(error)}" for error in new)


class Damaged(Struct, frozen=True):
    """A checkpoint that nothing can go on from."""

    path: Path
    reason: str


class DamagedState(ValueError):
    """The Scheduler's state of a checkpoint is none; the text says how."""


def step_of(checkpoint: Path) -> int:
    """Completed steps of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_intact(folder: RunFolder) -> tuple[Path | None, tuple[Damaged, ...]]:
    """The newest checkpoint whose every file is what was written, None where there is none; and the newer ones.

    Reads all files of those that it looks at.
    """
    damaged: list[Damaged] = []
    for step in reversed(folder.steps()):
        path = folder.checkpoint(step)
        reason = damage(path)
        if not reason:
            try:
                read_state(path)
            except DamagedState as error:
                reason = str(error)
        if not reason:
            return path, tuple(damaged)
        damaged.append(Damaged(path, reason))
    return None, tuple(damaged)


class _Format(Struct, frozen=True):
    format: int


def decode_state(content: bytes) -> Checkpointed:
    """The state that a file of any known format holds. Raises DamagedState, MsgspecError."""
    match msgspec.json.decode(content, type=_Format).format:
        case 1:
            return msgspec.json.decode(content, type=CheckpointedWithTask).upgraded
        case 2:
            return msgspec.json.decode(content, type=Checkpointed)
        case other:
            raise DamagedState(f"{CHECKPOINT_STATE} has format {other}, this version reads {STATE_FORMAT} and before")


def read_state(checkpoint: Path) -> Checkpointed:
    """The Scheduler's state in a checkpoint. Raises DamagedState."""
    try:
        state = decode_state((checkpoint / CHECKPOINT_STATE).read_bytes())
    except OSError as error:
        raise DamagedState(f"{CHECKPOINT_STATE} can't be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedState(f"{CHECKPOINT_STATE} can't be read: {error}") from error
    counts = (state.next_group, state.n_trained, state.n_discarded)
    versions = (*state.versions.values(), *state.copies.values())
    numbers = [number for carried in state.carried.values() for number in carried.values()]
    wrong = {
        "step": state.step != step_of(checkpoint),
        "best_step": not -1 <= state.best_step <= state.step,
        "evaluated_step": not -1 <= state.evaluated_step <= state.step,
        "open": list(state.open) != sorted({group for group in state.open if 0 <= group < state.next_group}),
        "n_trained": state.n_trained + state.n_discarded + len(state.open) != state.next_group,
        "a negative number": min((*counts, *versions), default=0) < 0,
        "a number": not all(map(math.isfinite, (state.best_value, state.best_reward, *numbers))),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise DamagedState(f"{CHECKPOINT_STATE} contradicts itself: {what}")
    return state


def rescuers(job: Job, left: Collection[int]) -> dict[int, dict[str, None]]:
    """The workers that are left and the trained roles of which each has a part.

    Raises OSError with a role of which nothing is left; what else is missing the workers know.
    """
    found: dict[int, dict[str, None]] = {}
    for name, call in job.graph.calls.items():
        if isinstance(call, Train):
            devices = job.plan.allocations[name].layout.mesh.devices
            holders = [worker for worker in devices if worker in left]
            if not holders:
                raise OSError(f"the weights of {call.model!r} were on {workers_text(devices)}: none is left")
            for worker in holders:
                found.setdefault(worker, {})[call.model] = None
    return found


async def rescue(
    workers: WorkerGroup, job: Job, checkpoints: Checkpoints, state: Checkpointed, inbox: Inbox
) -> Committed:
    """Have surviving workers write what they hold of `state`. Raises OSError where that fails.

    Where another one turns out to be gone, those that are left begin anew; what is written twice are the same bytes.
    """
    partial = checkpoints.partial(state.step)
    until = inbox.clock.now() + job.runtime.min_deadline_seconds
    for task in count(FIRST_RESCUE_TASK, -1):
        left = workers.fleet.running - inbox.gone
        roles = rescuers(job, left)
        for worker, own_roles in roles.items():
            versions = {role: state.versions[role] for role in own_roles}
            command = Rescue(task, state.step, str(partial), versions, tuple(sorted(left)))
            try:
                await workers.socket.send(worker, command)
            except TransportError:  # it has just ended
                inbox.gone.add(worker)
        if await _rescued(set(roles), task, inbox, (until, job.runtime.heartbeat_seconds)):
            break
    return await asyncio.to_thread(checkpoints.commit, state.step, partial, state)


async def _rescued(waiting: set[int], task: int, inbox: Inbox, limits: tuple[float, float]) -> bool:
    """True when all of `waiting` have done their part of `task`, False where one of them is gone. limits: the end of
    the wait, by the inbox's clock, and seconds after which to look who is silent. Raises OSError."""
    until, often = limits
    looked = inbox.clock.now()
    while waiting:
        if inbox.clock.now() - looked > often:  # so long a time for whatever had come before to be heard
            inbox.give_up_silent()
            looked = inbox.clock.now()
        if waiting & inbox.gone:
            return False
        match await inbox.take(max(0.0, min(often, until - inbox.clock.now()))):
            case None if inbox.clock.now() >= until:
                raise OSError(f"{workers_text(sorted(waiting))} did not save in time (runtime.min_deadline_seconds)")
            case Done(task=done, worker=worker) if done == task:
                waiting.discard(worker)
            case Failed(call=call, error=text, worker=worker) if call == RESCUE_CALL:
                raise OSError(f"worker {worker}: {text}")
            case _:
                pass  # what was still under way when the run failed
    return True
