"""The master's socket for the agents of its hosts: who may speak, and what they may say. Decides nothing."""

import logging

import zmq

from realgraph.runtime.hosts.join_key import JoinKey
from realgraph.runtime.hosts.messages import AgentMessage, MasterMessage, decode_from_agent, encode
from realgraph.runtime.processes.launcher import LaunchError
from realgraph.runtime.wire.curve import KeyPair
from realgraph.runtime.wire.refusals import UNREADABLE, Refusals
from realgraph.runtime.wire.sockets import SecureServer

log = logging.getLogger(__name__)

SEND_SECONDS = 10.0


class Hub:
    """Agents dial `listen` (port 0: any, then `port`); each must hold the join key. Make it inside an event loop.
    What is malformed is logged, and goes no further. Raises LaunchError where the address can't be listened on."""

    def __init__(self, keys: KeyPair, key: JoinKey, listen: str) -> None:
        self._public, self._refusals = key.client.public, Refusals(log)
        try:
            self._server = SecureServer(keys, (key.client.public,), f"tcp://{listen}")
        except zmq.ZMQError as error:
            raise LaunchError(f"this host can't listen on {listen}: {error.strerror}") from None

        self.port = int(self._server.address.rpartition(":")[2])

    async def send(self, agent: bytes, message: MasterMessage, who: str) -> None:
        """Queue a message for an agent. Raises TransportError, which calls it `who`, where it is not connected."""
        await self._server.send(agent, encode(message), who, SEND_SECONDS)

    async def receive(self) -> tuple[bytes, AgentMessage]:
        """The next well-formed message, and the agent that sent it. For one task, to be cancelled only at the end."""
        while True:
            frames = await self._server.receive()
            try:
                if len(frames) == 2 and frames[1].get("User-Id") == self._public:
                    return frames[0].bytes, decode_from_agent.decode(frames[1].buffer)
                problem = f"{len(frames)} frames, expected 2 with the join key"
            except UNREADABLE as error:
                problem = str(error)
            self._refusals.add(f"refused a message of an agent: {problem}")

    async def close(self) -> None:
        """Send what is queued, then close the port."""
        await self._server.close()
