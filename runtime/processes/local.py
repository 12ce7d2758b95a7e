"""The launcher of this host: starts, watches and ends its workers. Master side: imports no torch; the fork server does.

Each worker is a process and a session of its own, forked from a server that has the heavy modules loaded. What a worker
needs at its start, keys included, reaches it through an inherited socket: never by environment, arguments or a file.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from realgraph.runtime.job.rotation import last_lines
from realgraph.runtime.processes import processes
from realgraph.runtime.processes.clock import time_limit
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerProgram, WorkerStacks, describe_exit
from realgraph.runtime.processes.processes import Exited, Preloaded, Started
from realgraph.runtime.processes.stacks import forget_empty, size_of, stacks_file, why_silent, written_since
from realgraph.runtime.wire.curve import LOOPBACK
from realgraph.runtime.wire.frames import cut

SERVER_DUMP_SECONDS = 0.5
KILL_SECONDS = 5.0  # what the kernel may take to end killed processes
# macOS ends a forked process that first uses its frameworks, as a request over HTTP does to find a proxy, unless its
# parent's interpreter started with this.
_FORKING = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class WorkerHandle(Struct, frozen=True):
    """A started worker."""

    worker: int
    pid: int
    log: str

    def last_lines(self, n_lines: int = 20) -> str:
        """The end of its log, for an error message; '' where there is none yet."""
        return last_lines(Path(self.log), n_lines)


class _Payload(Struct, frozen=True):
    entry: str
    boot: WorkerBoot


def enter(payload: bytes) -> None:
    """Call the entry point with its WorkerBoot, in the worker's process."""
    start = msgspec.msgpack.decode(payload, type=_Payload)
    processes.resolve(start.entry)(start.boot)


class ForkServer(Protocol):
    """The fork server's process, as its owner sees it."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


def open_server(pipe: socket.socket, modules: Sequence[str], threads: int) -> ForkServer:
    """A fork server on the other end of `pipe`, a process with an interpreter of its own. Raises OSError."""
    with processes.end_signals_blocked():
        return subprocess.Popen(
            processes.command_line(pipe.fileno(), tuple(modules)),
            stdin=subprocess.DEVNULL,
            env={**_FORKING, **variables(), **dict.fromkeys(_THREAD_VARIABLES, str(threads))},
            pass_fds=(pipe.fileno(),),
            start_new_session=True,
        )


class _Server:
    """A fork server and the pipe to it, for one task at a time of any event loop. `end` it in every case."""

    def __init__(self, modules: Sequence[str], threads: int) -> None:
        """modules: that it preloads. threads: of one operation in what it starts. To be made in the main thread: on
        Linux it ends with the thread that started it. Raises OSError."""
        self._pipe, theirs = socket.socketpair()
        self._pipe.setblocking(False)
        with theirs:
            self._process = open_server(theirs, modules, threads)
        self._buffer = bytearray()
        self.is_preloaded = False

    async def preloaded(self) -> None:
        """Wait until it has its modules. Raises LaunchError."""
        if self.is_preloaded:
            return
        event = await self.next_event()
        if not isinstance(event, Preloaded):
            raise LaunchError("the fork server ended before it was ready; its messages are above")
        if event.error:
            raise LaunchError(f"the workers' modules cannot be imported:\n{event.error}")
        self.is_preloaded = True

    async def ask(self, request: processes.Request) -> bool:
        """Send a request, one at a time; where somebody has stopped the fork server, it goes on. False where it has
        ended."""
        self.signal(signal.SIGCONT)
        try:
            await asyncio.get_running_loop().sock_sendall(self._pipe, processes.frame(request))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def next_event(self) -> processes.Event | None:
        """Its next event; None where it has ended."""
        while (body := cut(self._buffer)) is None:
            try:
                piece = await asyncio.get_running_loop().sock_recv(self._pipe, 1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            self._buffer += piece
        return processes.decode_event(body)

    def signal(self, number: int) -> None:
        """Signal its process."""
        self._process.send_signal(number)

    def end(self, *, now: bool = False) -> None:
        """Let it kill what is left of its children, reap it, and end. now: it may be in the middle of an import; the
        kernel kills its children with it."""
        if now:
            self._process.kill()
        self._pipe.close()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalFleet:
    """Implements `launcher.Fleet` for the workers of this host. Made by `LocalLauncher`. kept: the fork server goes on
    when they have ended."""

    def __init__(self, server: _Server, boots: Sequence[WorkerBoot], *, kept: bool = False) -> None:
        self._server, self._kept = server, kept
        self._boots = {boot.worker: boot for boot in boots}
        self._exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._running = set(self._boots)
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()  # requests go over the pipe one by one
        self._entry = ""  # of the program that all workers run
        self.handles: dict[int, WorkerHandle] = {}

    @property
    def workers(self) -> tuple[int, ...]:
        """All that were started, in order."""
        return tuple(sorted(self._boots))

    def last_lines(self, worker: int, n_lines: int = 20) -> str:
        """The end of a worker's log; '' where there is none yet."""
        return self.handles[worker].last_lines(n_lines)

    def host_of(self, worker: int) -> str:
        """'': there is only this host."""
        return ""

    def clock_ahead(self, worker: int) -> float:
        """0: they have this host's clock."""
        return 0.0

    @property
    def running(self) -> frozenset[int]:
        """The workers that have not ended."""
        return frozenset(self._running)

    async def wait_exit(self) -> tuple[int, int]:
        """The next worker that ended, each once, and its exit status: the code, or -N where signal N killed it.

        Waits as long as workers live; for one task at a time.
        """
        return await self._exits.get()

    async def terminate(self, grace_seconds: float = 5.0, *, again: bool = False) -> None:
        """End what still runs and return when nothing is left: after a grace for workers that are ending by themselves
        SIGKILL for their whole groups; then the fork server. They leave SIGTERM to us, so it would end nothing."""
        self._server.signal(signal.SIGCONT)  # where somebody has stopped it: it has children to reap
        started, gone = self._reader is not None, False
        if self._reader is not None:
            gone = await self._all_gone(grace_seconds)
            if not gone:
                for worker in self.running:
                    await self._ask(processes.Signal(worker, signal.SIGKILL))
                gone = await self._all_gone(KILL_SECONDS)
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if not (self._kept and gone):
            await asyncio.to_thread(self._server.end, now=not started)
        for boot in self._boots.values():
            forget_empty(stacks_file(Path(boot.log)))

    async def dump_server(self) -> None:
        """Have the fork server write to stderr where its threads are: in the import of a module, most often."""
        self._server.signal(processes.STACK_SIGNAL)
        await asyncio.sleep(SERVER_DUMP_SECONDS)

    async def dump_stacks(self, worker: int) -> WorkerStacks:
        """See Fleet."""
        if worker not in self._running or worker not in self.handles:
            return WorkerStacks(worker, missing="it does not run")
        file = stacks_file(Path(self._boots[worker].log))
        try:
            before = size_of(file)
            await self._ask(processes.Signal(worker, processes.STACK_SIGNAL))
            text = await written_since(file, before)
        except OSError as error:  # of the file: what has failed before is what counts
            return WorkerStacks(worker, missing=f"{file} can't be read: {error.strerror}")
        return WorkerStacks(worker, text, "" if text else why_silent(self.handles[worker].pid))

    async def kill(self, worker: int) -> None:
        """End one worker at once, with its process group; nothing happens where it has ended."""
        if worker in self._running:
            await self._ask(processes.Signal(worker, signal.SIGKILL))

    async def restart(self, boot: WorkerBoot) -> None:
        """See Fleet."""
        worker = boot.worker
        assert worker in self._boots and worker not in self._running, f"worker {worker} has not ended"
        before = self._boots[worker]
        self._boots[worker] = msgspec.structs.replace(boot, interface=before.interface, owner_pid=before.owner_pid)
        self._running.add(worker)
        await self._spawn(self._boots[worker])

    async def _all_gone(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _ask(self, request: processes.Request) -> None:
        async with self._asking:
            there = await self._server.ask(request)
        if not there:
            self._lost()

    async def start(self, entry: str) -> None:
        """Wait for the preloaded modules, then start every worker. Raises LaunchError."""
        await self._server.preloaded()
        self._entry = entry
        for boot in self._boots.values():
            await self._spawn(boot)
        while len(self.handles) < len(self._boots):
            event = await self._server.next_event()
            if event is None:
                raise LaunchError("the fork server ended while it started the workers; its messages are above")
            self._note(event)
        self._reader = asyncio.create_task(self._read())

    async def _spawn(self, boot: WorkerBoot) -> None:
        Path(boot.log).parent.mkdir(parents=True, exist_ok=True)
        payload = msgspec.msgpack.encode(_Payload(self._entry, boot))
        stacks, title = str(stacks_file(Path(boot.log))), f"realgraph worker {boot.worker}"
        target = processes.target_of(enter)
        await self._ask(processes.Spawn(boot.worker, target, payload, boot.log, stacks, title))

    async def _read(self) -> None:
        while (event := await self._server.next_event()) is not None:
            self._note(event)
        self._lost()

    def _note(self, event: processes.Event) -> None:
        match event:
            case Started(number=worker, pid=pid):
                self.handles[worker] = WorkerHandle(worker, pid, self._boots[worker].log)
            case Exited(number=worker, status=status):
                self._end(worker, status)
            case Preloaded():
                raise AssertionError("a second Preloaded")

    def _lost(self) -> None:
        """The fork server is gone, and so are its children: the kernel saw to it."""
        for worker in self.running:
            self._end(worker, -signal.SIGKILL)

    def _end(self, worker: int, status: int) -> None:
        if worker in self._running:
            self._running.remove(worker)
            self._exits.put_nowait((worker, status))
            self._changed.set()


class LocalLauncher:
    """Implements `launcher.Launcher`: all workers on this host, tied to this process. interface: the address that they
    listen on."""

    def __init__(self, interface: str = LOOPBACK) -> None:
        self.interface = interface
        self._ahead: tuple[WorkerProgram, int, _Server] | None = None

    @contextlib.contextmanager
    def loading(self, program: WorkerProgram, threads: int) -> Iterator[None]:
        """The fork server of the next start, of this program and threads, loads its modules from now on; it ends with
        this where no start has come. To be entered in the main thread."""
        with contextlib.suppress(OSError):  # no process can be started: the start tries again, and says so
            self._ahead = program, threads, _Server(_modules(program), threads)
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead[2].end(now=True)
                self._ahead = None

    async def start(
        self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float = 180.0
    ) -> LocalFleet:
        """See Launcher. All workers have the threads of the first. To be called from the main thread: on Linux the
        workers end with the thread that started them."""
        assert boots, "no workers to start"
        fleet = LocalFleet(self._server_for(program, boots[0].threads), self._here(boots))
        return await _started(fleet, program, deadline_seconds)

    def _server_for(self, program: WorkerProgram, threads: int) -> _Server:
        if self._ahead is not None and self._ahead[:2] == (program, threads):
            server, self._ahead = self._ahead[2], None
            return server
        return _Server(_modules(program), threads)

    def _here(self, boots: Sequence[WorkerBoot]) -> list[WorkerBoot]:
        return [msgspec.structs.replace(boot, interface=self.interface, owner_pid=os.getpid()) for boot in boots]


class KeptLauncher(LocalLauncher):
    """A LocalLauncher for several runs, one after the other, and other work with the same modules: its one fork server
    begins to load them at once. To be made in the main thread; `close` it in every case."""

    def __init__(self, program: WorkerProgram, threads: int) -> None:
        """Raises OSError."""
        super().__init__()
        self._program, self._threads = program, threads
        self._server = _Server(_modules(program), threads)

    async def start(
        self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float = 180.0
    ) -> LocalFleet:
        """See Launcher; always of the program and the threads that it was made for."""
        assert (program, boots[0].threads) == (self._program, self._threads), "other modules, or other threads"
        return await _started(LocalFleet(self._server, self._here(boots), kept=True), program, deadline_seconds)

    async def call(self, function: Callable[[bytes], None], payload: bytes, log: Path) -> None:
        """Run a module's function on its argument in a process of its own, which prints to `log`. No workers may run.
        Raises LaunchError where it fails."""
        await self._server.preloaded()
        target, stacks = processes.target_of(function), str(stacks_file(log))
        asked = await self._server.ask(processes.Spawn(0, target, payload, str(log), stacks, "realgraph"))
        event = await self._server.next_event() if asked else None
        if isinstance(event, Started):
            event = await self._server.next_event()
        forget_empty(Path(stacks))
        if not isinstance(event, Exited) or event.status:
            how = describe_exit(event.status) if isinstance(event, Exited) else "was lost with the fork server"
            raise LaunchError(f"the process of {target} {how}:\n{last_lines(log, 20)}")

    def close(self) -> None:
        """End the fork server, with all that it has started."""
        self._server.signal(signal.SIGCONT)
        self._server.end(now=not self._server.is_preloaded)


def _modules(program: WorkerProgram) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*program.preload, program.entry.partition(":")[0])))


async def _started(fleet: LocalFleet, program: WorkerProgram, deadline_seconds: float) -> LocalFleet:
    """The fleet, its workers started. Raises LaunchError, with nothing left running."""
    try:
        async with time_limit(deadline_seconds):
            await fleet.start(program.entry)
    except TimeoutError:
        await fleet.dump_server()
        await fleet.terminate(0)
        text = f"the workers were not started within {deadline_seconds:g} s; where that stands is above"
        raise LaunchError(text) from None
    except BaseException:
        await fleet.terminate(0)
        raise
    return fleet
