"""Starts the workers of a run on several hosts: lets their agents join, checks what they are, and has them launch."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import Cluster
from realgraph.runtime.files.server import FileServer
from realgraph.runtime.hosts.checks import faults, in_order
from realgraph.runtime.hosts.facts import is_public, own_versions
from realgraph.runtime.hosts.fleet import HostsFleet, RemoteHost
from realgraph.runtime.hosts.hub import Hub
from realgraph.runtime.hosts.join_key import JoinKey, make_join_key, write_join_key
from realgraph.runtime.hosts.messages import EndHost, LaunchWorkers, Look
from realgraph.runtime.hosts.starter import AgentStarter, Invitation
from realgraph.runtime.job.manifest import FileSum
from realgraph.runtime.job.run_folder import RunFolder, write_atomic
from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerProgram
from realgraph.runtime.wire.curve import KeyPair, make_keys

LOOK_SECONDS = 60.0  # for a host to look for files, on file systems that may be slow
READ_BYTES_PER_SECOND = 50e6  # of data, at least
KEY_FILE, TOKEN_FILE = "join.key", "hosts.token"  # of the run's directory, while its hosts join


class Needed(Struct, frozen=True):
    """The needs of a run that every host must meet. folder: the run's directory. paths: of models, data, user code.
    sums: of files of data, with which hosts that do not see `folder` compare theirs. variables: that functions get of a
    host's environment, with the place in the run file that names each. sampled: checksums of samples of the files that
    all hosts must have alike."""

    cluster: Cluster
    folder: Path
    paths: tuple[str, ...] = ()
    sums: dict[str, FileSum] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, FileSum] = field(default_factory=dict)


class JoinTerms(Struct, frozen=True):
    """The terms on which hosts join. host, port: an address or name of this host, where the master listens for agents;
    port 0 is any that is free. See `launch.HostsLaunch` for the rest."""

    host: str
    port: int = 0
    interface: str | None = None
    join_seconds: float = 600.0
    n_spare: int = 0  # hosts beyond those of the plan
    trusted_network: bool = False


class HostsLauncher:
    """Implements `launcher.Launcher`, and HostsOwner, by agents that dial in. say: shows a line to whoever has typed
    `realgraph run`."""

    def __init__(self, terms: JoinTerms, needed: Needed, starter: AgentStarter, say: Callable[[str], None]) -> None:
        self._terms, self._needed, self._starter, self._say = terms, needed, starter, say
        self.interface = socket.gethostbyname(terms.host)  # ZeroMQ binds addresses alone
        self._port = terms.port
        self._key_file = needed.folder / KEY_FILE
        self._invited: tuple[KeyPair, JoinKey] | None = None  # what hosts have been given that are to join again
        self.n_coming = 0  # of them

    @property
    def n_hosts(self) -> int:
        """See HostsOwner."""
        return sum(group.nodes for group in self._needed.cluster.groups)

    @property
    def n_spare(self) -> int:
        """See HostsOwner."""
        return self._terms.n_spare

    async def start(self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float) -> HostsFleet:
        """See Launcher; `deadline_seconds` begin once all hosts have joined. Raises ConfigError for hosts that are not
        as the plan has them."""
        keys, key = self._invited or _new_keys()
        hub = Hub(keys, key, f"{self.interface}:{self._port}")
        self._port = hub.port
        fleet = HostsFleet(hub, self)
        try:
            write_join_key(key, self._key_file)
            if self._invited is None:
                await self._starter.start(self._invitation(key))
            hosts = await self._joined(fleet)
            await self._look(fleet, hosts)
            await self._launch(fleet, hosts, (boots, program, deadline_seconds))
        except BaseException:
            await fleet.terminate(0)
            raise
        if not self.n_spare:
            self._key_file.unlink(missing_ok=True)
        return fleet

    def _invitation(self, key: JoinKey) -> Invitation:
        address = f"{self._terms.host}:{self._port}"
        return Invitation(address, key.text, self._key_file, self.n_hosts, self.n_spare, self._terms.interface)

    def start_again(self, needed: Needed) -> None:
        """The next `start` is for these needs, on hosts that have been asked to join again."""
        self._needed = needed

    async def give_up(self) -> None:
        """There is no other start: hosts that were to join again end once `join_seconds` are over."""
        await self._starter.stop()

    def invite_again(self, grace_seconds: float) -> EndHost:
        """See HostsOwner."""
        self._invited = _new_keys()
        return EndHost(grace_seconds, self._invited[1].text, self._terms.join_seconds)

    async def ended(self, n_coming: int) -> None:
        """See HostsOwner."""
        self.n_coming = n_coming
        self._key_file.unlink(missing_ok=True)
        if not n_coming:
            await self._starter.stop()

    def welcome(self, host: RemoteHost, n_joined: int) -> None:
        """See HostsOwner."""
        spare = ", to spare" if n_joined > self.n_hosts else ""
        self._say(f"{host.text} has joined: {n_joined} of {self.n_hosts}{spare}")

    async def _joined(self, fleet: HostsFleet) -> list[RemoteHost]:
        """All hosts, as the nodes of the cluster in order. Raises LaunchError, ConfigError."""
        seconds = self._terms.join_seconds
        joining = asyncio.create_task(fleet.until(lambda: len(fleet.hosts) == self.n_hosts, seconds))
        failing = asyncio.create_task(self._starter.failed())
        try:
            await asyncio.wait((joining, failing), return_when=asyncio.FIRST_COMPLETED)
            why = "" if joining.done() else failing.result()
            if not why:
                joining.result()
        except TimeoutError:
            why = f"no more within {seconds:g} s (launch.join_seconds)"
        finally:
            for task in (joining, failing):
                task.cancel()
            await asyncio.gather(joining, failing, return_exceptions=True)
        if why:
            names = ", ".join(host.facts.name for host in fleet.hosts.values()) or "none"
            raise LaunchError(f"{len(fleet.hosts)} of {self.n_hosts} hosts have joined ({names}): {why}")
        by_id = {id(host.facts): host for host in fleet.hosts.values()}
        ordered = in_order([host.facts for host in by_id.values()], self._needed.cluster, host_id())
        trusted = self._terms.trusted_network
        found = list(faults(ordered, self._needed.cluster, own_versions(), trusted_network=trusted))
        if found:
            raise ConfigError(found)
        return [by_id[id(facts)] for facts in ordered]

    async def _look(self, fleet: HostsFleet, hosts: Sequence[RemoteHost]) -> None:
        """Raises ConfigError where a host lacks files, LaunchError where one does not answer."""
        folder, content = self._needed.folder, secrets.token_hex(16)
        token, sums, variables = folder / TOKEN_FILE, self._needed.sums, self._needed.variables
        seconds = LOOK_SECONDS + sum(file.nbytes for file in sums.values()) / READ_BYTES_PER_SECOND
        write_atomic(token, content.encode())
        try:
            for host in hosts:
                host.asked = time.time()
                look = Look(self._needed.paths, str(token), content, sums, tuple(variables), self._needed.sampled)
                await fleet.send(host, look)
            await fleet.until(lambda: all(host.looked for host in hosts), seconds)
        except TimeoutError:
            silent = ", ".join(host.text for host in hosts if host.looked is None)
            raise LaunchError(f"no answer within {seconds:.0f} s of {silent}") from None
        finally:
            token.unlink(missing_ok=True)
        problems: list[Problem] = []
        for host in hosts:
            assert host.looked is not None
            for path in host.looked.missing:
                hint = "put it there, at the same path, or on a file system that all hosts share"
                problems.append(Problem(Where(path="$.launch"), f"{host.text} has no {path}", hint, "hosts"))
            for text in host.looked.other_data:
                hint = "copy it from the host of the run: all hosts must read the same data"
                problems.append(Problem(Where(path="$.data.path"), f"{host.text}: {text}", hint, "hosts"))
            for text in host.looked.others:
                hint = "copy it from the host of the run: the workers of all hosts must read the same"
                problems.append(Problem(Where(path="$.launch"), f"{host.text}: {text}", hint, "hosts"))
            for name in host.looked.unset:
                text = f"{host.text} has no environment variable {name!r}"
                hint = "set it where that host's agent is started: its functions get it there"
                problems.append(Problem(Where(path=variables[name]), text, hint, "hosts"))
        if problems:
            raise ConfigError(problems)

    async def _launch(
        self,
        fleet: HostsFleet,
        hosts: Sequence[RemoteHost],
        what: tuple[Sequence[WorkerBoot], WorkerProgram, float],
    ) -> None:
        """Raises LaunchError."""
        boots, program, seconds = what
        boots = self._with_files(fleet, hosts, boots)
        began = time.monotonic()
        for node, host in enumerate(hosts):
            own = tuple(boot for boot in boots if boot.node == node)
            fleet.place(host, own)
            if not await fleet.send(host, LaunchWorkers(own, program, seconds)):
                raise LaunchError(f"{host.text} is gone")
        try:
            await fleet.until(lambda: all(host.started for host in hosts) or any(_stopped(h) for h in hosts), seconds)
        except TimeoutError:
            late = ", ".join(host.text for host in hosts if not host.started)
            passed = time.monotonic() - began
            raise LaunchError(f"the workers were not started within {passed:.0f} s on {late}") from None
        for host in hosts:
            if why := _stopped(host):
                raise LaunchError(f"{host.text}: {why}")
            if host.logs:
                self._say(f"{host.text} does not see {self._needed.folder}: its workers' checkpoints come to this host")
                self._say(f"  their logs are there, in {host.logs}")

    def _with_files(
        self, fleet: HostsFleet, hosts: Sequence[RemoteHost], boots: Sequence[WorkerBoot]
    ) -> Sequence[WorkerBoot]:
        """The boots: where a host does not see the run directory, with the address of who reads and writes it."""
        apart = {node for node, host in enumerate(hosts) if host.looked and not host.looked.shares_run_folder}
        if not apart:
            return boots
        allowed = [boot.keys.public for boot in boots if boot.node in apart]
        server = fleet.files = FileServer(RunFolder(self._needed.folder), allowed, self.interface)
        there = {"files": server.address, "files_key": server.key}
        return [msgspec.structs.replace(boot, **there) if boot.node in apart else boot for boot in boots]


def _new_keys() -> tuple[KeyPair, JoinKey]:
    keys = make_keys()
    return keys, make_join_key(keys)


def check_listen(terms: JoinTerms, path: str) -> None:
    """Raises ConfigError, at that path of the run file, for an address that is not this host's, is in use, or is
    public."""
    fault, hint = "", "give an address of the host where `realgraph run` is typed, and a port that nothing else has"
    try:
        address = socket.gethostbyname(terms.host), terms.port
        if is_public(address[0]) and not terms.trusted_network:
            fault = f"{address[0]} is a public address"
            hint = "listen on a private network, or set launch.trusted_network: true behind a firewall"
        else:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        fault = f"this host can't listen on {terms.host}:{terms.port}: {error.strerror or error}"
    if fault:
        raise ConfigError([Problem(Where(path=path), fault, hint, "hosts")])


def _stopped(host: RemoteHost) -> str:
    return host.failed or host.reason or ("its agent has ended" if host.ended else "")
