"""Saving after a failure: who is asked for what, also where another worker turns out to be gone meanwhile."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from realgraph.graphs.spec import Train
from realgraph.runtime.commands.actions import Checkpointed
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.checkpoints import Checkpoints, Committed, read_state, rescue, rescuers
from realgraph.runtime.master.inbox import Inbox
from realgraph.runtime.wire.protocol import RESCUE_CALL, Done, Failed, Reply, Rescue
from realgraph.runtime.wire.sockets import TransportError
from tests.shapes import Shape, job_of

WORKERS = 4
JOB = job_of(Shape(algorithm="grpo", n_workers=WORKERS))
VERSIONS = {call.model: 3 for call in JOB.graph.calls.values() if isinstance(call, Train)}
STATE = Checkpointed(3, VERSIONS, 24, 24, 0)
(HOLDERS,) = {
    JOB.plan.allocations[name].layout.mesh.devices for name, call in JOB.graph.calls.items() if isinstance(call, Train)
}


class Survivors:
    """Workers that answer a Rescue at once. dies: workers that end when they are asked. deaf: that take no message.
    fails: what one says instead of Done."""

    def __init__(self, dies: Sequence[int] = (), deaf: Sequence[int] = (), fails: dict[int, str] | None = None) -> None:
        self.running = frozenset(range(WORKERS))
        self.ready = dict.fromkeys(range(WORKERS))
        self.fleet = self.socket = self
        self.asked: list[tuple[int, Rescue]] = []
        self._dies, self._deaf, self._fails = dies, deaf, fails or {}
        self._replies: asyncio.Queue[tuple[int, Reply]] = asyncio.Queue()
        self._ends: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    async def send(self, worker: int, command: Rescue) -> None:
        if worker in self._deaf:
            raise TransportError("gone")
        self.asked.append((worker, command))
        if worker in self._dies:
            self._ends.put_nowait((worker, -9))
        elif worker in self._fails:
            self.reply(Failed(worker, RESCUE_CALL, self._fails[worker], "disk"))
        else:
            self.reply(Done(worker, command.task, RESCUE_CALL))

    def reply(self, reply: Done | Failed) -> None:
        self._replies.put_nowait((reply.worker, reply))

    def host_of(self, worker: int) -> str:
        return ""

    def clock_ahead(self, worker: int) -> float:
        return 0.0

    async def receive(self) -> tuple[int, Reply]:
        return await self._replies.get()

    async def wait_exit(self) -> tuple[int, int]:
        return await self._ends.get()


async def rescued(survivors: Survivors, folder: RunFolder, gone: Sequence[int] = ()) -> Committed:
    group = cast(Any, survivors)
    inbox = Inbox(group, JOB.runtime)
    inbox.gone.update(gone)
    try:
        return await rescue(group, JOB, Checkpoints(folder, 1), STATE, inbox)
    finally:
        await inbox.close()


@pytest.mark.parametrize("how", ["dies", "deaf"])
def test_those_that_are_left_begin_anew_where_another_is_gone(tmp_path: Path, how: str) -> None:
    lost, others = HOLDERS[1], [worker for worker in HOLDERS if worker != HOLDERS[1]]
    survivors = Survivors(dies=[lost]) if how == "dies" else Survivors(deaf=[lost])
    folder = RunFolder(tmp_path)
    done = asyncio.run(rescued(survivors, folder))
    assert read_state(done.path) == STATE
    last = [(worker, command) for worker, command in survivors.asked if command.task == survivors.asked[-1][1].task]
    assert [worker for worker, _ in last] == others
    for _, command in last:
        assert command.versions == VERSIONS
        assert lost not in command.writers
        assert set(others) <= set(command.writers)


def test_who_is_known_to_be_gone_is_not_asked_and_a_lost_part_is_said(tmp_path: Path) -> None:
    survivors = Survivors(fails={HOLDERS[0]: "no worker holds [0:3] of 'x'"})
    with pytest.raises(OSError, match=rf"worker {HOLDERS[0]}: no worker holds \[0:3\] of 'x'"):
        asyncio.run(rescued(survivors, RunFolder(tmp_path), gone=[HOLDERS[1]]))
    assert HOLDERS[1] not in [worker for worker, _ in survivors.asked]
    with pytest.raises(OSError, match="none is left"):
        rescuers(JOB, set(range(WORKERS)) - set(HOLDERS))
    assert not list(RunFolder(tmp_path).checkpoints.glob("step-??????"))
