"""The places of servers: one that is started, and started again where it has died, or one that somebody else runs."""

import asyncio
import time

import msgspec

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import ServerUnreachable, SglangError
from realgraph.runtime.rollout.messages import Timeouts
from realgraph.runtime.rollout.opening.expected import Expected, check
from realgraph.runtime.rollout.server import ServerProcess, ServerSpec
from realgraph.runtime.rollout.serving import ServedWeights

ASK_SECONDS = 0.5  # between two questions whether a server is back


class OwnServer:
    """A server that is started, and started again where it has died."""

    def __init__(self, spec: ServerSpec, expected: Expected, timeouts: Timeouts) -> None:
        self._spec, self._expected, self._timeouts = spec, expected, timeouts
        self.process: ServerProcess | None = None

    async def reach(self, weights: ServedWeights, before: SglangClient | None) -> SglangClient:
        """See ServerHome."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)
        spec = msgspec.structs.replace(self._spec, model=weights.folder, version=weights.version)
        self.process = ServerProcess(spec)
        client = SglangClient(self.process.url, self.process.key, self._timeouts)
        await self.process.wait_ready(client)
        await check(client, self._expected)
        await client.open(weights.version)
        return client

    def close(self) -> None:
        """End it, and all that it has started."""
        if self.process is not None:
            self.process.stop()


class GivenServer:
    """A server that somebody else has started, on this host. Weights that it has from before are replaced."""

    def __init__(self, url: str, expected: Expected, patience: float, timeouts: Timeouts) -> None:
        """patience: seconds that it may be gone, or take to read its first weights."""
        self._url, self._expected, self._patience, self._timeouts = url, expected, patience, timeouts

    async def reach(self, weights: ServedWeights, before: SglangClient | None) -> SglangClient:
        """See ServerHome."""
        client = SglangClient(self._url, timeouts=self._timeouts)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await check(client, self._expected)
                break
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(ASK_SECONDS)
        await client.resume()  # a run that ended before may have left it paused
        await client.open(weights.version - 1)
        try:
            seconds = max(self._patience, self._timeouts.update_seconds)
            await client.update_from_disk(weights.folder, weights.version, seconds=seconds)
        except SglangError as error:
            hint = "it has to see the run's folders: start it on this host, as this user"
            raise ConfigError([Problem(self._expected.where, str(error), hint, "sglang")]) from error
        return client

    def close(self) -> None:
        """Nothing: it is not ours."""
