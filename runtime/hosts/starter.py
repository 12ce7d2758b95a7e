"""Starting the agents of a run's hosts: what an agent is given, the interface, and the way by hand."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct


class Invitation(Struct, frozen=True):
    """All that an agent needs to join a run. key: one line with a secret, which lies in `key_file` as well. n_hosts:
    of the plan; n_spare: as many more may join."""

    address: str  # HOST:PORT of the master
    key: str
    key_file: Path
    n_hosts: int
    n_spare: int = 0
    interface: str | None = None  # of every host, for samples and weights

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of `realgraph worker` but for the key."""
        interface = ("--interface", self.interface) if self.interface else ()
        return ("--connect", self.address, *interface)


class AgentStarter(Protocol):
    """Has one agent started on each host of a run."""

    async def start(self, invitation: Invitation) -> None:
        """Begin to; they join later. Raises LaunchError."""
        ...

    async def failed(self) -> str:
        """The reason for which hosts that have not joined never will; waits as long as there is none."""
        ...

    async def stop(self) -> None:
        """End what still runs of it, once the run has ended its agents or given up waiting for them."""
        ...


class StartedByHand:
    """Implements AgentStarter: the user types one line on each host. say: shows a line to the user. whose: the hosts
    are, as the line has it."""

    def __init__(self, say: Callable[[str], None], whose: str = "of the plan") -> None:
        self._say, self._whose = say, whose

    async def start(self, invitation: Invitation) -> None:
        """See AgentStarter."""
        hosts = "host" if invitation.n_hosts == 1 else f"{invitation.n_hosts} hosts"
        self._say(f"waiting for the {hosts} {self._whose}; type on each of them, this one too where it is one:")
        self._say(f"  realgraph worker --key {invitation.key_file} {' '.join(invitation.words)}")
        self._say("where a host does not see that file: --key -, with its one line on standard input")

    async def failed(self) -> str:
        """See AgentStarter: `launch.join_seconds` ends the wait for a user."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        """See AgentStarter: agents end with the run."""
