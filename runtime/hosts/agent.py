"""The agent of one host of a run: joins the master, starts this host's workers, says how they end, and dies with it.

Imports no torch: the fork server of the workers does.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.hosts.facts import other_files, own_facts
from realgraph.runtime.hosts.host_logs import RELAYED_LINES, own_logs
from realgraph.runtime.hosts.join_key import JoinKey, parse_join_key
from realgraph.runtime.hosts.messages import (
    BEAT_SECONDS,
    AgentMessage,
    DumpStacks,
    EndHost,
    HostBeat,
    HostEnded,
    HostFailed,
    HostLeaves,
    HostStarted,
    Join,
    KillWorker,
    LaunchWorkers,
    Look,
    Looked,
    MasterBeat,
    MasterMessage,
    Refuse,
    RestartWorker,
    StacksDumped,
    WorkerEnded,
    decode_from_master,
    encode,
)
from realgraph.runtime.job.manifest import sum_sampled
from realgraph.runtime.processes.clock import time_limit
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.processes.interrupts import Interrupted, Interrupts, unless
from realgraph.runtime.processes.launcher import Fleet, Launcher, LaunchError, WorkerBoot, WorkerStacks, describe_exit
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.processes.open_files import allow_open_files
from realgraph.runtime.wire.refusals import UNREADABLE
from realgraph.runtime.wire.sockets import SecureClient, TransportError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0  # to reach a master at all
MASTER_LOST_SECONDS = 60.0  # without a connection, after which the workers are ended
_LOOK_AGAIN_SECONDS = 1.0
DONE, LOST, INTERRUPTED = 0, 1, 130


class _Again(Exception):
    """The run is to start once more, on hosts that dial again."""

    def __init__(self, key: JoinKey, seconds: float) -> None:
        super().__init__()
        self.key, self.seconds = key, seconds


class HostAgent:
    """One agent, from its join to its end. say: shows a line to whoever watches it."""

    def __init__(
        self,
        client: SecureClient,
        address: tuple[str, int],
        say: Callable[[str], None],
        launcher: Callable[[str], Launcher] = LocalLauncher,
    ) -> None:
        """address: of the master. launcher: made with this host's address for the others."""
        self._client, self._address, self._say, self._launcher = client, address, say, launcher
        self._fleet: Fleet | None = None
        self._interface = ""
        self._own_logs: Path | None = None  # where the workers print to, of a folder that the master does not see
        self._launching: asyncio.Task[None] | None = None
        self._exits: asyncio.Task[None] | None = None
        self._n_running = 0  # workers whose ends are still to be told
        self._dumps: set[asyncio.Task[None]] = set()

    async def join(self, name: str, interface: str, seconds: float = CONNECT_SECONDS) -> None:
        """Reach the master and tell what this host is. interface: this host's address for the others. Raises
        ConfigError where no master takes the key for so many seconds."""
        self._interface = interface
        facts = await asyncio.to_thread(own_facts, name, interface)
        try:
            async with time_limit(seconds):
                while not self._client.connected:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise await asyncio.to_thread(self._unreached, seconds) from None
        await self._send(Join(facts))

    def _unreached(self, seconds: float) -> ConfigError:
        host, port = self._address
        if _listens(self._address):
            text = f"{host}:{port} does not take this key within {seconds:g} s"
            hint = "it is the key of another run, or of an earlier start of this one: take the newest"
        else:
            text = f"nothing listens on {host}:{port}"
            hint = "start `realgraph run` first, and take the address that it prints"
        return ConfigError([Problem(Where("command line", path="--connect"), text, hint, "hosts")])

    async def serve(self) -> int:
        """Do what the master asks until it asks for the end, or is gone. Returns the exit code. Raises ConfigError
        where it does not take this host, and _Again where the run starts once more."""
        watch, beats = asyncio.create_task(self._until_lost()), asyncio.create_task(self._beat())
        try:
            while True:
                message = await self._next(watch)
                match message:
                    case None:
                        self._say(f"the master at {self._client.address.removeprefix('tcp://')} is gone: ending")
                        return LOST
                    case Refuse(reason=reason):
                        where = Where("command line", path="--connect")
                        raise ConfigError([Problem(where, f"the run does not take this host: {reason}", "", "hosts")])
                    case Look():
                        await self._send(await asyncio.to_thread(_look, message))
                    case LaunchWorkers():
                        self._launching = asyncio.create_task(self._launch(message))
                    case RestartWorker(boot=boot):
                        await self._restart(boot)
                    case MasterBeat():
                        pass
                    case DumpStacks(worker=worker):
                        dump = asyncio.create_task(self._dump_stacks(worker))
                        self._dumps.add(dump)
                        dump.add_done_callback(self._dumps.discard)
                    case KillWorker(worker=worker):
                        if self._fleet is not None:
                            await self._fleet.kill(worker)
                    case EndHost(grace_seconds=grace, again=again, again_seconds=seconds):
                        await self.end(grace)
                        await self._send(HostEnded())
                        if again:
                            raise _Again(parse_join_key(again, "the master"), seconds)
                        return DONE
        finally:
            watch.cancel()
            beats.cancel()

    async def leave(self, reason: str) -> None:
        """End the workers at once, and tell the master why."""
        await self._send(HostLeaves(reason))
        await self.end(0)
        await self._send(HostEnded())

    async def end(self, grace_seconds: float) -> None:
        """End the workers, after a grace by force."""
        if self._launching is not None:
            if not self._launching.done():
                self._launching.cancel()
            await asyncio.gather(self._launching, return_exceptions=True)
        if self._fleet is not None:
            fleet, self._fleet = self._fleet, None
            await fleet.terminate(grace_seconds)
        if self._exits is not None:  # all have ended, and this says so
            await asyncio.gather(self._exits, return_exceptions=True)

    async def _next(self, watch: "asyncio.Task[None]") -> MasterMessage | None:
        """The master's next message; None once it is gone."""
        while True:
            receiving = asyncio.create_task(self._client.receive())
            await asyncio.wait((receiving, watch), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
                return None
            frames = receiving.result()
            try:
                return decode_from_master.decode(frames[0])
            except UNREADABLE as error:
                log.warning("refused a message of the master: %s", error)

    async def _until_lost(self) -> None:
        """Returns where the connection has been lost for long, or the master's port is closed: its process is gone."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            if self._client.connected:
                continue
            if self._client.lost_seconds > MASTER_LOST_SECONDS:
                return
            if await asyncio.to_thread(_listens, self._address) is False:
                return

    async def _beat(self) -> None:
        while True:
            await self._send(HostBeat())
            await asyncio.sleep(BEAT_SECONDS)

    async def _launch(self, message: LaunchWorkers) -> None:
        workers = ", ".join(str(boot.worker) for boot in message.boots)
        self._say(f"starting workers {workers}")
        boots, logs = message.boots, ""
        try:
            if any(boot.files for boot in boots):
                boots, logs = own_logs(boots)
                self._say(f"this host does not see the run directory: its workers' logs are in {logs}")
            allow_open_files(max((boot.n_workers for boot in boots), default=1))
            launcher = self._launcher(self._interface)
            fleet = await launcher.start(boots, message.program, message.deadline_seconds)
        except (LaunchError, ConfigError) as error:
            await self._send(HostFailed(str(error)))
            return
        self._own_logs = Path(logs) if logs else None
        self._fleet, self._n_running = fleet, len(boots)
        self._exits = asyncio.create_task(self._report_exits(fleet))
        await self._send(HostStarted(logs))
        self._say(f"workers {workers} run; this host ends with the run")

    async def _restart(self, boot: WorkerBoot) -> None:
        if self._fleet is None:
            return  # the host ends
        self._say(f"starting worker {boot.worker} again")
        if self._own_logs is not None:
            boot = replace(boot, log=str(self._own_logs / Path(boot.log).name))
        await self._fleet.restart(boot)
        self._n_running += 1
        if self._exits is None or self._exits.done():
            self._exits = asyncio.create_task(self._report_exits(self._fleet))

    async def _dump_stacks(self, worker: int) -> None:
        stacks = WorkerStacks(worker, missing="it has not been started")
        if self._fleet is not None:
            stacks = await self._fleet.dump_stacks(worker)
        await self._send(StacksDumped(stacks))

    async def _report_exits(self, fleet: Fleet) -> None:
        while self._n_running:
            worker, status = await fleet.wait_exit()
            self._n_running -= 1
            if status:
                self._say(f"worker {worker} {describe_exit(status)}")
            wanted = status != 0 or self._own_logs is not None
            await self._send(WorkerEnded(worker, status, fleet.last_lines(worker, RELAYED_LINES) if wanted else ""))

    async def _send(self, message: AgentMessage) -> None:
        await self._client.send(encode(message))


def _look(message: Look) -> Looked:
    asked = time.time()
    missing = tuple(path for path in message.paths if not Path(path).exists())
    try:
        shares = Path(message.token).read_text(encoding="ascii") == message.content
    except (OSError, ValueError):
        shares = False
    other_data = () if shares else tuple(other_files(message.sums))
    unset = tuple(name for name in message.variables if name not in variables())
    sampled = {path: wanted for path, wanted in message.sampled.items() if shares or path not in message.sums}
    others = () if missing else tuple(other_files(sampled, sum_sampled))
    return Looked(missing, shares, other_data, asked, time.time(), unset, others)


def _listens(address: tuple[str, int]) -> bool | None:
    """True where something listens there, False where the host answers that nothing does; None without an answer."""
    try:
        with socket.create_connection(address, timeout=2.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


async def run_agent(address: tuple[str, int], key: JoinKey, who: tuple[str, str], say: Callable[[str], None]) -> int:
    """The agent of this host from its join to its end; the exit code. who: this host's name, and its address for the
    others. Raises ConfigError."""
    seconds = CONNECT_SECONDS
    while True:
        try:
            return await _one_start(address, key, who, seconds, say)
        except _Again as again:
            say("the run starts again: this host joins it once more")
            key, seconds = again.key, again.seconds


async def _one_start(
    address: tuple[str, int], key: JoinKey, who: tuple[str, str], seconds: float, say: Callable[[str], None]
) -> int:
    """An agent for one start of the run. Raises ConfigError, _Again."""
    host, port = address
    client = SecureClient(f"tcp://{host}:{port}", secrets.token_hex(8).encode(), key.client, key.server)
    agent = HostAgent(client, address, say)
    try:
        with Interrupts(lambda count: say("ending the workers of this host")) as interrupts:
            try:
                await unless(interrupts.first, agent.join(*who, seconds))
                return await unless(interrupts.first, agent.serve())
            except Interrupted:
                await agent.leave("its agent was interrupted")
                return INTERRUPTED
            except TransportError as error:
                say(f"error: {error}")
                return LOST
    finally:
        await agent.end(0)
        await client.close()
