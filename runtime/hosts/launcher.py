"""Starts the workers of a run on several hosts: lets their agents join, checks what they are, and has them launch."""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import Cluster
from realgraph.runtime.hosts.checks import faults, in_order
from realgraph.runtime.hosts.facts import is_public, own_versions
from realgraph.runtime.hosts.fleet import HostsFleet, RemoteHost
from realgraph.runtime.hosts.hub import Hub
from realgraph.runtime.hosts.join_key import make_join_key, write_join_key
from realgraph.runtime.hosts.messages import LaunchWorkers, Look
from realgraph.runtime.hosts.starter import AgentStarter, Invitation
from realgraph.runtime.job.run_folder import write_atomic
from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.processes.launcher import LaunchError, WorkerBoot, WorkerProgram
from realgraph.runtime.wire.curve import make_keys

LOOK_SECONDS = 60.0  # for a host to look for files, on file systems that may be slow
KEY_FILE, TOKEN_FILE = "join.key", "hosts.token"  # of the run's directory, while its hosts join


class Needed(Struct, frozen=True):
    """The needs of a run that every host must meet. folder: the run's directory. paths: of models, data, user code."""

    cluster: Cluster
    folder: Path
    paths: tuple[str, ...] = ()


class JoinTerms(Struct, frozen=True):
    """The terms on which hosts join. host, port: an address or name of this host, where the master listens for agents;
    port 0 is any that is free. See `launch.HostsLaunch` for the rest."""

    host: str
    port: int = 0
    interface: str | None = None
    join_seconds: float = 600.0
    trusted_network: bool = False


class HostsLauncher:
    """Implements `launcher.Launcher` by agents that dial in. say: shows a line to whoever has typed `realgraph run`."""

    def __init__(self, terms: JoinTerms, needed: Needed, starter: AgentStarter, say: Callable[[str], None]) -> None:
        self._terms, self._needed, self._starter, self._say = terms, needed, starter, say
        self.interface = socket.gethostbyname(terms.host)  # ZeroMQ binds addresses alone
        self._key_file = needed.folder / KEY_FILE
        self._n_hosts = sum(group.nodes for group in needed.cluster.groups)

    async def start(self, boots: Sequence[WorkerBoot], program: WorkerProgram, deadline_seconds: float) -> HostsFleet:
        """See Launcher; `deadline_seconds` begin once all hosts have joined. Raises ConfigError for hosts that are not
        as the plan has them."""
        keys = make_keys()
        key = make_join_key(keys)
        hub = Hub(keys, key, f"{self.interface}:{self._terms.port}")
        fleet = HostsFleet(hub, self._n_hosts, self._welcome, self._starter.stop)
        try:
            write_join_key(key, self._key_file)
            address = f"{self._terms.host}:{hub.port}"
            await self._starter.start(
                Invitation(address, key.text, self._key_file, self._n_hosts, self._terms.interface)
            )
            hosts = await self._joined(fleet)
            await self._look(fleet, hosts)
            await self._launch(fleet, hosts, (boots, program, deadline_seconds))
        except BaseException:
            await fleet.terminate(0)
            raise
        finally:
            self._key_file.unlink(missing_ok=True)
        return fleet

    def _welcome(self, host: RemoteHost, n_joined: int) -> None:
        self._say(f"{host.text} has joined: {n_joined} of {self._n_hosts}")

    async def _joined(self, fleet: HostsFleet) -> list[RemoteHost]:
        """All hosts, as the nodes of the cluster in order. Raises LaunchError, ConfigError."""
        seconds = self._terms.join_seconds
        joining = asyncio.create_task(fleet.until(lambda: len(fleet.hosts) == self._n_hosts, seconds))
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
            raise LaunchError(f"{len(fleet.hosts)} of {self._n_hosts} hosts have joined ({names}): {why}")
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
        token = folder / TOKEN_FILE
        write_atomic(token, content.encode())
        try:
            for host in hosts:
                host.asked = time.time()
                await fleet.tell(host, Look(self._needed.paths, str(token), content))
            await fleet.until(lambda: all(host.looked for host in hosts), LOOK_SECONDS)
        except TimeoutError:
            silent = ", ".join(host.text for host in hosts if host.looked is None)
            raise LaunchError(f"no answer within {LOOK_SECONDS:g} s of {silent}") from None
        finally:
            token.unlink(missing_ok=True)
        problems: list[Problem] = []
        for host in hosts:
            assert host.looked is not None
            for path in host.looked.missing:
                hint = "put it there, at the same path, or on a file system that all hosts share"
                problems.append(Problem(Where(path="$.launch"), f"{host.text} has no {path}", hint, "hosts"))
            if not host.looked.shares_run_folder:
                text = f"{host.text} does not see the run directory {folder}"
                hint = "choose an outputs.dir on a file system that all hosts share"
                problems.append(Problem(Where(path="$.outputs.dir"), text, hint, "hosts"))
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
        began = time.monotonic()
        for node, host in enumerate(hosts):
            own = tuple(boot for boot in boots if boot.node == node)
            fleet.place(host, own)
            if not await fleet.tell(host, LaunchWorkers(own, program, seconds)):
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
