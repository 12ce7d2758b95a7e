"""Whole checkpoints: the workers' parts and the Scheduler's state under one name, or nothing. Master side."""

import asyncio
import shutil
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.spec import Train
from realgraph.planner.layout import Layout
from realgraph.runtime.actions import Checkpointed
from realgraph.runtime.failures import workers_text
from realgraph.runtime.inbox import Exit, Inbox
from realgraph.runtime.job import Job
from realgraph.runtime.launch import describe_exit
from realgraph.runtime.protocol import RESCUE_CALL, Done, Failed, Rescue
from realgraph.runtime.run_folder import CHECKPOINT_STATE, RunFolder, commit_folder, point_link, prune, write_atomic
from realgraph.runtime.startup import Crew
from realgraph.runtime.transport import TransportError

RESCUE_TASK = -1


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def step_of(self, checkpoint: Path) -> int:
        """Completed steps of a checkpoint, by its name."""
        return int(checkpoint.name.removeprefix("step-"))

    def clean(self) -> None:
        """Remove checkpoints that were never made whole. Nobody may be writing one."""
        for partial in self._folder.partials():
            shutil.rmtree(partial, ignore_errors=True)

    def newest_step(self) -> int:
        """Completed steps of the newest whole checkpoint, 0 if there is none."""
        return max(self._folder.steps(), default=0)

    def partial(self, step: int) -> Path:
        """An empty folder for the parts of a checkpoint. Raises OSError."""
        path = self._folder.partial(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, step: int, partial: Path, state: Checkpointed) -> Path:
        """Add the state, make the folder whole, mark the best, remove old ones. Raises OSError."""
        write_atomic(partial / CHECKPOINT_STATE, msgspec.json.format(msgspec.json.encode(state)))
        final = self._folder.checkpoint(step)
        commit_folder(partial, final)
        if state.best_step == step:
            point_link(self._folder.best, final)
        list(prune(self._folder, self._keep))
        return final

    def state(self, checkpoint: Path) -> Checkpointed:
        """The Scheduler's state in a checkpoint. Raises OSError, msgspec.ValidationError."""
        return msgspec.json.decode((checkpoint / CHECKPOINT_STATE).read_bytes(), type=Checkpointed)


class Rescuers(Struct, frozen=True):
    """Who can save what: worker -> trained roles that it holds whole; worker -> trained roles that it has a part of."""

    alone: dict[int, list[str]]
    together: dict[int, list[str]]

    def commands(self, step: int, folder: Path, versions: dict[str, int]) -> list[tuple[int, Rescue]]:
        """What is to be sent to whom."""
        return [
            (worker, Rescue(RESCUE_TASK, step, str(folder), {role: versions[role] for role in roles}, together))
            for together, chosen in ((False, self.alone), (True, self.together))
            for worker, roles in chosen.items()
        ]


def rescuers(job: Job, alive: frozenset[int]) -> Rescuers:
    """Raises OSError naming a role that the survivors do not hold whole."""
    alone: dict[int, list[str]] = {}
    together: dict[int, list[str]] = {}
    for name, call in job.graph.calls.items():
        if not isinstance(call, Train):
            continue
        layout: Layout = job.plan.allocations[name].layout
        devices = layout.mesh.devices
        survivors = [worker for worker in devices if worker in alive]
        if not survivors:
            raise OSError(f"the weights of {call.model!r} were on {workers_text(devices)}: none is left")
        if len(devices) == 1 or (layout.sharding == "replicated" and layout.tp == layout.pp == 1):
            chosen, savers = alone, survivors[:1]
        elif len(survivors) == len(devices):
            chosen, savers = together, survivors
        else:
            raise OSError(f"the weights of {call.model!r} were sharded, and a part is gone")
        for worker in savers:
            roles = chosen.setdefault(worker, [])
            if call.model not in roles:
                roles.append(call.model)
    return Rescuers(alone, together)


async def rescue(crew: Crew, job: Job, checkpoints: Checkpoints, border: Checkpointed, inbox: Inbox) -> Path:
    """Have surviving workers write what they hold of the state at `border`. Raises OSError where that fails."""
    chosen = rescuers(job, crew.fleet.running - inbox.gone)
    partial = checkpoints.partial(border.step)
    commands = chosen.commands(border.step, partial, border.versions)
    waiting = Counter(worker for worker, _ in commands)
    until = time.monotonic() + job.runtime.min_deadline_seconds
    try:
        for worker, command in commands:
            await crew.socket.send(worker, command)
    except TransportError as error:
        raise OSError(str(error)) from error
    while +waiting:
        match await inbox.take(max(0.0, until - time.monotonic())):
            case None:
                seconds = job.runtime.min_deadline_seconds
                raise OSError(f"{workers_text(sorted(+waiting))} did not save within {seconds:g} s")
            case Done(task=task, worker=worker) if task == RESCUE_TASK:
                waiting[worker] -= 1
            case Failed(call=call, error=text, worker=worker) if call == RESCUE_CALL:
                raise OSError(f"worker {worker}: {text}")
            case Exit(worker=worker, status=status) if waiting[worker]:
                raise OSError(f"worker {worker} {describe_exit(status)} while it saved")
            case _:
                pass  # what was still under way when the run failed
    return await asyncio.to_thread(checkpoints.commit, border.step, partial, border)
