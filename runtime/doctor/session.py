"""A check of machines over workers that run: each looks at its host, then all pairs measure, in rounds. Master side.

Each question has a deadline: whoever does not answer is said to, and the others go on.
"""

import asyncio
import contextlib
import itertools
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.doctor.facts import HostReport, PairReport
from realgraph.runtime.doctor.messages import (
    Answer,
    BackendName,
    Connected,
    Examine,
    Examined,
    JoinPair,
    OpenPair,
    PairMeasured,
    PairOpened,
    Task,
    decode_answer,
    encode,
)
from realgraph.runtime.hosts.fleet import clock_ahead
from realgraph.runtime.job.run_folder import write_atomic
from realgraph.runtime.processes.launcher import Fleet, WorkerBoot, WorkerProgram, describe_exit
from realgraph.runtime.wire.curve import KeyPair, make_keys
from realgraph.runtime.wire.sockets import SecureServer, TransportError

PROGRAM = WorkerProgram("realgraph.runtime.doctor.worker:main", ("torch",))
CONNECT_SECONDS, EXAMINE_SECONDS, PAIR_SECONDS = 10.0, 30.0, 12.0
_TOKEN = ".realgraph-doctor.token"


class SilentError(Exception):
    """A worker has ended, or has not answered; the text says which and why."""


class CheckMaster:
    """The master's end of a check: asks workers, one question at a time each. Make it inside an event loop."""

    def __init__(self, n_workers: int, interface: str) -> None:
        self._master = make_keys()
        self._keys: dict[int, KeyPair] = {worker: make_keys() for worker in range(n_workers)}
        allowed = [pair.public for pair in self._keys.values()]
        self._server = SecureServer(self._master, allowed, f"tcp://{interface}:0")
        self._answers: dict[int, asyncio.Queue[Answer | str]] = {worker: asyncio.Queue() for worker in self._keys}
        self._ended: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._tasks = [asyncio.create_task(self._listen())]

    def boots(self) -> tuple[WorkerBoot, ...]:
        """All that the workers are started with. Each removes its log, once nothing but itself may fail."""
        logs = f"{tempfile.gettempdir()}/realgraph-doctor-{secrets.token_hex(8)}"
        return tuple(
            WorkerBoot(
                worker=worker,
                master=self._server.address,
                master_key=self._master.public,
                keys=keys,
                log=f"{logs}-{worker}.log",
                n_workers=len(self._keys),
                node=worker,
            )
            for worker, keys in self._keys.items()
        )

    def watch(self, fleet: Fleet) -> None:
        """A worker's end answers whatever it was asked."""
        self._tasks.append(asyncio.create_task(self._exits(fleet)))

    def next_number(self) -> int:
        """A number that no task has had."""
        return next(self._numbers)

    async def close(self) -> None:
        """Close the port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()

    async def assign(self, worker: int, task: Task) -> None:
        """Give a worker its next task; late answers to the last one are forgotten. Raises SilentError."""
        while not self._answers[worker].empty():
            self._answers[worker].get_nowait()
        try:
            await self._server.send(b"%d" % worker, encode(task), f"worker {worker}", 2.0)
        except TransportError as error:
            raise SilentError(self._ended.get(worker) or str(error)) from None

    async def answer(self, worker: int, seconds: float, number: int = 0) -> Answer:
        """Its next answer to the task of that number. Raises SilentError."""
        if worker in self._ended:
            raise SilentError(self._ended[worker])
        try:
            async with asyncio.timeout(seconds):
                while not isinstance(found := await self._answers[worker].get(), str) and found.number != number:
                    pass
        except TimeoutError:
            raise SilentError(f"no answer within {seconds:g} s") from None
        if isinstance(found, str):
            raise SilentError(found)
        return found

    async def _listen(self) -> None:
        while True:
            frames = await self._server.receive()
            name = frames[0].bytes
            worker = int(name) if name.isdigit() and len(name) <= 9 else -1
            keys = self._keys.get(worker)
            if keys is None or len(frames) != 2 or frames[1].get("User-Id") != keys.public:
                continue  # another worker's name: its own answers are taken, this one is not
            with contextlib.suppress(msgspec.MsgspecError):
                self._answers[worker].put_nowait(decode_answer.decode(frames[1].buffer))

    async def _exits(self, fleet: Fleet) -> None:
        while True:
            worker, status = await fleet.wait_exit()
            self._ended[worker] = f"its worker {describe_exit(status)}"
            self._answers[worker].put_nowait(self._ended[worker])


class Examination(Struct, frozen=True):
    """The hosts of workers. silent: who has not answered, and why."""

    hosts: dict[int, HostReport]
    silent: dict[int, str]


async def examine(master: CheckMaster, names: Mapping[int, str], folder: Path) -> Examination:
    """Looks of workers at their hosts, which have these names, at once."""
    content, token = secrets.token_hex(16), folder / _TOKEN
    with contextlib.suppress(OSError):  # the look at the disk says why
        write_atomic(token, content.encode())
    try:
        tasks = {i: Examine(name, str(folder), str(token), content) for i, name in names.items()}
        answers = await asyncio.gather(*(_examined(master, i, task) for i, task in tasks.items()))
        found = dict(zip(tasks, answers, strict=True))
    finally:
        with contextlib.suppress(OSError):
            token.unlink(missing_ok=True)
    hosts = {i: one for i, one in found.items() if isinstance(one, HostReport)}
    return Examination(hosts, {i: one for i, one in found.items() if isinstance(one, str)})


async def _examined(master: CheckMaster, worker: int, task: Examine) -> HostReport | str:
    try:
        first = await master.answer(worker, CONNECT_SECONDS)
        assert isinstance(first, Connected), first
        asked = time.time()
        await master.assign(worker, task)
        answer = await master.answer(worker, EXAMINE_SECONDS)
    except SilentError as error:
        return str(error)
    assert isinstance(answer, Examined), answer
    ahead = clock_ahead((asked, answer.asked), (answer.answered, time.time()))
    return replace(answer.host, clock_ahead_seconds=ahead)


def rounds(n_workers: int) -> list[list[tuple[int, int]]]:
    """All pairs of workers in rounds, in each of which a worker is in one pair at most: the circle method of
    tournaments."""
    circle = list(range(n_workers + n_workers % 2))  # of an odd number one rests in each round
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < n_workers])
        circle.insert(1, circle.pop())
    return found


async def measure(master: CheckMaster, names: Mapping[int, str], backend: BackendName) -> list[PairReport]:
    """Every pair of these workers, in their order."""
    workers, found = sorted(names), []
    for at_once in rounds(len(workers)):
        pairs = [(workers[i], workers[j]) for i, j in at_once]
        made = await asyncio.gather(*(_pair(master, pair, backend) for pair in pairs))
        for (first, second), one in zip(pairs, made, strict=True):
            numbers = (one.there_bytes_per_s, one.back_bytes_per_s, one.latency_seconds)
            found.append((first, second, PairReport(names[first], names[second], backend, *numbers, one.error)))
    return [report for _, _, report in sorted(found, key=lambda one: one[:2])]


async def _pair(master: CheckMaster, pair: tuple[int, int], backend: BackendName) -> PairMeasured:
    (first, second), number = pair, master.next_number()
    try:
        await master.assign(first, OpenPair(backend, number))
        opened = await master.answer(first, PAIR_SECONDS, number)
        if not isinstance(opened, PairOpened):
            return opened if isinstance(opened, PairMeasured) else PairMeasured(error="an answer to another question")
        await master.assign(second, JoinPair(backend, number, opened.address))
        joined, led = await asyncio.gather(*(master.answer(worker, PAIR_SECONDS, number) for worker in (second, first)))
    except SilentError as error:
        return PairMeasured(error=str(error))
    assert isinstance(joined, PairMeasured) and isinstance(led, PairMeasured)
    return replace(led, error=joined.error or led.error)
