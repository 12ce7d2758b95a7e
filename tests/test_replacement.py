"""New processes in the place of lost engines, as the master starts them: real processes and sockets, no models."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from realgraph.runtime.commands.actions import EngineJoined
from realgraph.runtime.processes.launcher import WorkerBoot, WorkerProgram
from realgraph.runtime.processes.local import LocalFleet, LocalLauncher
from realgraph.runtime.replacement.engines import EngineReplacements, RunWorkers
from realgraph.runtime.wire.curve import LOOPBACK, make_keys
from realgraph.runtime.wire.protocol import Configure, Failed, Hello, Meet, Met, Peer, Ready, Reply, Shutdown
from realgraph.runtime.wire.transport import MasterSocket, WorkerSocket
from tests.shapes import Shape, job_of

N_WORKERS = 3
JOB = job_of(Shape(n_workers=4, split=True, staleness=2))


def peer(boot: WorkerBoot) -> Peer:
    return Peer(boot.worker, "host", f"process {os.getpid()}", "tcp://127.0.0.1:1", boot.keys.public)


def enter(boot: WorkerBoot) -> None:
    """A worker: it writes down whom it meets. A file beside its log says what else it does when it is started anew."""
    note = Path(boot.log).with_suffix(".lives")
    lives = note.read_text().split() if note.exists() else []
    note.write_text(" ".join([*lives, str(os.getpid())]))
    how = Path(boot.log).with_suffix(".how")
    asyncio.run(serve(boot, how.read_text().split()[len(lives) - 1 : len(lives)] if lives and how.exists() else []))


async def serve(boot: WorkerBoot, how: list[str]) -> None:
    if how == ["ends"]:
        print("out of memory")
        os._exit(9)
    socket = WorkerSocket(boot.worker, boot.master, boot.keys, boot.master_key)
    await socket.send(Hello(boot.worker, os.getpid(), peer(boot), f"store {boot.worker}" if boot.rendezvous else ""))
    while not isinstance(command := await socket.receive(), Shutdown):
        match command:
            case Configure(peers=peers, engine=engine, collective=collective):
                seen = Path(boot.log).with_suffix(".peers")
                seen.write_text(
                    f"{engine} {collective} {' '.join(one.local.removeprefix('process ') for one in peers)}"
                )
                if how == ["fails"]:
                    await socket.send(Failed(boot.worker, "", "the model is gone", "start"))
                elif how != ["hangs"]:
                    await socket.send(Ready(boot.worker, 10))
            case Meet(peer=other, process=process):
                with Path(boot.log).with_suffix(".met").open("a") as met:
                    met.write(f"{other.worker} {process} {other.local.removeprefix('process ')}\n")
                while Path(boot.log).with_suffix(".busy").exists():
                    await asyncio.sleep(0.02)
                await socket.send(Met(boot.worker, other.worker, process))
            case _:
                raise AssertionError(command)


class Run:
    """A master's part, by hand."""

    def __init__(self, folder: Path, limit: int, start_seconds: float = 20.0) -> None:
        rollout = msgspec.structs.replace(JOB.rollout, replacements=limit)
        runtime = msgspec.structs.replace(JOB.runtime, start_seconds=start_seconds)
        self.job = msgspec.structs.replace(JOB, rollout=rollout, runtime=runtime)
        self.folder, self.notes, self.joined = folder, list[str](), list[EngineJoined]()
        self.fleet: LocalFleet
        self.replies = list[Reply]()

    async def __aenter__(self) -> "Run":
        master, keys = make_keys(), [make_keys() for _ in range(N_WORKERS)]
        self.socket = MasterSocket(master, {n: pair.public for n, pair in enumerate(keys)}, LOOPBACK)
        boots = [
            WorkerBoot(n, self.socket.address, master.public, keys[n], str(self.folder / f"{n}.log"))
            for n in range(N_WORKERS)
        ]
        self.fleet = await LocalLauncher().start(boots, WorkerProgram(f"{__name__}:enter"), 60)
        peers: dict[int, Peer] = {}
        while len(peers) < N_WORKERS:
            _, reply = await self.socket.receive()
            assert isinstance(reply, Hello)
            peers[reply.worker] = reply.peer
        workers = RunWorkers(self.fleet, self.socket, {boot.worker: boot for boot in boots}, peers)
        self.replacements = EngineReplacements(self.job, workers, self.joined.append, self.note)
        self.listening = asyncio.create_task(self.listen())
        return self

    def note(self, text: str, level: str) -> None:
        self.notes.append(text)

    async def listen(self) -> None:
        while True:
            _, reply = await self.socket.receive()
            self.replies.append(reply)
            if isinstance(reply, Hello | Ready | Met | Failed):
                self.replacements.hear(reply)

    async def __aexit__(self, *error: object) -> None:
        await self.replacements.close()
        self.listening.cancel()
        await self.fleet.terminate(0)
        await self.socket.close()

    def read(self, worker: int, what: str) -> str:
        file = self.folder / f"{worker}.{what}"
        return file.read_text() if file.exists() else ""

    async def lose(self, *engine: int) -> None:
        """The first worker of an engine is killed; what is left of it is the master's to end."""
        os.kill(self.fleet.handles[engine[0]].pid, signal.SIGKILL)
        await self.fleet.wait_exit()
        await self.replacements.lost(tuple(sorted(engine)))

    async def until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                self.replacements.check()
                await asyncio.sleep(0.02)


def test_a_new_process_knows_all_and_all_know_it(tmp_path: Path) -> None:
    """The second of two that are lost at once knows the first; each is told to the Scheduler when it is ready."""

    async def run() -> None:
        async with Run(tmp_path, limit=5) as its:
            await its.lose(0)
            await its.lose(1)
            await its.until(lambda: len(its.joined) == 2)
            await its.lose(0)
            await its.until(lambda: len(its.joined) == 3)
            assert its.joined == [EngineJoined((0,), 1), EngineJoined((1,), 1), EngineJoined((0,), 2)]
            await its.until(lambda: its.read(2, "met").count("\n") == 3)
            pids = {n: its.fleet.handles[n].pid for n in range(N_WORKERS)}
            lines = [line.split() for line in its.read(2, "met").splitlines()]
            assert [line[:2] for line in lines] == [["0", "1"], ["1", "1"], ["0", "2"]]
            assert [int(line[2]) for line in lines[1:]] == [pids[1], pids[0]]
            assert its.read(0, "peers") == f"(0,)  {pids[0]} {pids[1]} {pids[2]}"
            assert not its.replacements.ending
            assert its.notes == []

    asyncio.run(run())


@pytest.mark.parametrize("ends", [False, True])
def test_a_new_process_gets_work_when_all_that_run_let_it_in(tmp_path: Path, ends: bool) -> None:
    """Whoever ends meanwhile is not waited for."""

    async def run() -> None:
        (tmp_path / "2.busy").touch()
        async with Run(tmp_path, limit=1) as its:
            await its.lose(0)
            await its.until(lambda: bool(its.read(1, "met")) and bool(its.read(2, "met")))
            await asyncio.sleep(0.5)
            assert not its.joined
            if ends:
                os.kill(its.fleet.handles[2].pid, signal.SIGKILL)
                await its.fleet.wait_exit()
            else:
                (tmp_path / "2.busy").unlink()
            await its.until(lambda: bool(its.joined))
            assert its.joined == [EngineJoined((0,), 1)]
            assert its.notes == []

    asyncio.run(run())


@pytest.mark.slow
def test_processes_that_do_not_get_ready_count_and_the_next_one_may(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "0.how").write_text("ends fails hangs well")
        async with Run(tmp_path, limit=4, start_seconds=3.0) as its:
            began = time.monotonic()
            await its.lose(0)
            await its.until(lambda: bool(its.joined))
            assert time.monotonic() - began < 20
            assert its.joined == [EngineJoined((0,), 4)]
            reasons = [note.partition("not ready: ")[2] for note in its.notes]
            assert reasons == [
                "it has ended: out of memory",
                "the model is gone",
                "it has taken 3 s (runtime.start_seconds)",
            ]
            assert len(its.read(0, "lives").split()) == 5
            assert its.fleet.running == {0, 1, 2}
            await its.lose(0)
            await its.until(lambda: len(its.notes) == 4)
            assert its.notes[-1] == "the place of worker 0 stays empty: all 4 of rollout.replacements were made"
            assert its.fleet.running == {1, 2}

    asyncio.run(run())


@pytest.mark.parametrize("limit", [0, 1])
def test_no_more_are_started_than_the_run_allows(tmp_path: Path, limit: int) -> None:
    async def run() -> None:
        async with Run(tmp_path, limit) as its:
            for _ in range(limit):
                await its.lose(0)
                await its.until(lambda: bool(its.joined))
            await its.lose(0)
            await its.until(lambda: limit == 0 or bool(its.notes))
            await asyncio.sleep(0.3)
            assert its.replacements.ending == {0}
            assert its.fleet.running == {1, 2}
            assert len(its.read(0, "lives").split()) == 1 + limit

    asyncio.run(run())


def test_an_engine_of_two_workers_is_replaced_by_two_that_meet_by_themselves(tmp_path: Path) -> None:
    """Its other worker is ended first. Where one of the two does not get ready, both are begun again."""

    async def run() -> None:
        (tmp_path / "1.how").write_text("ends")
        async with Run(tmp_path, limit=3) as its:
            before = its.fleet.handles[0].pid
            await its.lose(1, 0)
            its.replacements.hear(Failed(0, "rollout", "worker 1 is gone", "worker"))  # by the process before
            await its.until(lambda: len(its.notes) == 1)
            assert "an engine of new processes in the place of workers 0, 1 is not ready: it has ended" in its.notes[0]
            await its.until(lambda: bool(its.joined))
            assert its.joined == [EngineJoined((0, 1), 2)]
            pids = {n: its.fleet.handles[n].pid for n in range(N_WORKERS)}
            assert before not in pids.values()
            for n in (0, 1):
                assert its.read(n, "peers") == f"(0, 1) store 0 {pids[0]} {pids[1]} {pids[2]}"
            await its.until(lambda: its.read(2, "met").count("\n") == 2)
            assert its.read(2, "met") == f"0 2 {pids[0]}\n1 2 {pids[1]}\n"
            assert its.fleet.running == {0, 1, 2} and not its.replacements.ending

    asyncio.run(run())


def test_one_that_was_silent_is_ended_first(tmp_path: Path) -> None:

    async def run() -> None:
        async with Run(tmp_path, limit=1) as its:
            before = its.fleet.handles[1].pid
            os.kill(before, signal.SIGSTOP)
            await its.replacements.lost((1,))
            await its.until(lambda: bool(its.joined))
            assert its.fleet.handles[1].pid != before

    asyncio.run(run())
