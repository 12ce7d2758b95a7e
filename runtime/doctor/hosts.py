"""The hosts of a check: agents dial in as for a run, and each starts one worker. Those that do not are named."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from realgraph.runtime.doctor.session import PROGRAM
from realgraph.runtime.hosts.facts import is_public
from realgraph.runtime.hosts.fleet import HostsFleet, RemoteHost
from realgraph.runtime.hosts.hub import Hub
from realgraph.runtime.hosts.join_key import make_join_key, write_join_key
from realgraph.runtime.hosts.messages import EndHost, LaunchWorkers
from realgraph.runtime.hosts.starter import AgentStarter, Invitation
from realgraph.runtime.processes.host_id import host_id
from realgraph.runtime.processes.launcher import WorkerBoot
from realgraph.runtime.wire.curve import make_keys

START_SECONDS = 60.0  # for a host to load torch from a file system that may be slow
_LOOK_SECONDS = 0.5


class Terms(Struct, frozen=True):
    """The number of hosts that join, and the place. interface: of every host; address, port: where this one listens."""

    n_hosts: int
    address: str
    port: int
    key_file: Path
    join_seconds: float
    interface: str | None = None
    trusted_network: bool = False  # allow public addresses: gloo, NCCL and torch's store do not authenticate


class JoinedHosts:
    """The hosts of a check, from their joining to their end. say: shows a line to whoever has typed the command."""

    def __init__(self, terms: Terms, starter: AgentStarter, say: Callable[[str], None]) -> None:
        """Make it inside an event loop. Raises LaunchError where nothing can listen there."""
        self._terms, self._starter, self._say = terms, starter, say
        keys = make_keys()
        self._key = make_join_key(keys)
        hub = Hub(keys, self._key, f"{terms.address}:{terms.port}")
        self._port = hub.port
        self.fleet = HostsFleet(hub, self)
        self.hosts: list[RemoteHost] = []
        self.missing = ""  # why not all have joined

    @property
    def n_hosts(self) -> int:
        """That may join."""
        return self._terms.n_hosts

    @property
    def n_spare(self) -> int:
        """None: all that join are looked at."""
        return 0

    def welcome(self, host: RemoteHost, n_joined: int) -> None:
        """A host has joined."""
        self._say(f"{host.text} has joined: {n_joined} of {self.n_hosts}")

    def invite_again(self, grace_seconds: float) -> EndHost:
        """A check does not start again."""
        return EndHost(grace_seconds)

    async def ended(self, n_coming: int) -> None:
        """All hosts have ended their workers."""
        self._terms.key_file.unlink(missing_ok=True)
        await self._starter.stop()

    async def join(self) -> None:
        """Let hosts join; `missing` says why some have not in time. Raises LaunchError, OSError."""
        terms = self._terms
        write_join_key(self._key, terms.key_file)
        address = f"{terms.address}:{self._port}"
        await self._starter.start(
            Invitation(address, self._key.text, terms.key_file, terms.n_hosts, 0, terms.interface)
        )
        joining = asyncio.create_task(
            self.fleet.until(lambda: len(self.fleet.hosts) == terms.n_hosts, terms.join_seconds)
        )
        failing = asyncio.create_task(self._starter.failed())
        try:
            await asyncio.wait((joining, failing), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                self.missing = failing.result()
            else:
                joining.result()
        except TimeoutError:
            self.missing = f"no more within {terms.join_seconds:g} s"
        finally:
            for task in (joining, failing):
                task.cancel()
            await asyncio.gather(joining, failing, return_exceptions=True)
        here = host_id()
        order = sorted(self.fleet.hosts.values(), key=lambda host: (host.facts.id != here, _by_number(host)))
        self.hosts = list(order)

    async def launch(self, boots: tuple[WorkerBoot, ...]) -> dict[int, str]:
        """Start a worker on each host. The workers that do not run, and why."""
        for host, boot in zip(self.hosts, boots, strict=True):
            self.fleet.place(host, (boot,))
            if is_public(host.facts.address) and not self._terms.trusted_network:
                host.failed = "its address is public: name a private network by --interface, or add --trusted-network"
            elif not await self.fleet.send(host, LaunchWorkers((boot,), PROGRAM, START_SECONDS)):
                host.failed = "it is not connected any more"
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and any(_awaited(host) for host in self.hosts):
            with contextlib.suppress(TimeoutError):
                await self.fleet.until(lambda: not any(_awaited(host) for host in self.hosts), _LOOK_SECONDS)
        return {i: _why(host) for i, host in enumerate(self.hosts) if not host.started or host.silent}


def _awaited(host: RemoteHost) -> bool:
    return not (host.started or host.failed or host.ended or host.silent)


def _why(host: RemoteHost) -> str:
    if host.silent and not host.failed:
        return "its agent has not been heard of since it joined: is its link up?"
    return host.failed or host.reason or f"its worker was not started within {START_SECONDS:g} s"


def _by_number(host: RemoteHost) -> tuple[int, str]:
    """Puts node10 behind node9."""
    return len(host.facts.name), host.facts.name
