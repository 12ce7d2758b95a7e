"""The side of the SGLang engine that belongs to its asyncio loop: a server, its requests and its weights. A server that
dies is reached anew, and its requests go on with their tokens. Knows no plan and no reallocation."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.engine import Completion
from realgraph.runtime.rollout.answers import AnswerPart
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import (
    CallRefused,
    QueueFull,
    ServerSilent,
    ServerUnreachable,
    SglangError,
    UnreadableAnswer,
)
from realgraph.runtime.rollout.messages import BroadcastBucket, BroadcastGroup, PauseMode
from realgraph.runtime.rollout.samples import AnswerWrong, GrowingSample
from realgraph.runtime.rollout.weights.agreement import BroadcastFailed
from realgraph.runtime.rollout.weights.broadcast import GROUP, HOST, READY, Broadcast, decode_group

log = logging.getLogger(__name__)

MOST_DEATHS = 3  # of servers, one after the other, without a sample that was finished in between
FULL_SECONDS = 0.5  # until a request is sent again to a server that had no place
QUIET_SECONDS = 60.0  # until all requests of a server have come back that are to be sent again
ABORT_SECONDS = 0.05  # between two looks at them
WATCH_SECONDS = 1.0  # between two looks at the server's progress
LOAD_SECONDS = 5.0  # between two questions for the server's cache
GIVE_UP_SECONDS = 10.0  # for a server to notice that a broadcast has failed elsewhere

T = TypeVar("T")


class ServedWeights(NamedTuple):
    """A model folder, and the version of its weights."""

    folder: str
    version: int


class ServingBounds(NamedTuple):
    """Bounds of one engine."""

    most_requests: int  # that a server has at once
    token_seconds: float = 600.0  # without a token from a server that streams and is asked for some
    answer_seconds: float = 600.0  # without an answer from one that does not


class ServerHome(Protocol):
    """The place of one server."""

    async def reach(self, weights: ServedWeights, before: SglangClient | None) -> SglangClient:
        """A client of a server that has these weights: the one before it, if any, does not answer. Raises
        SglangError."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


@dataclass(eq=False)
class Requests:
    """Requests in flight and what has come of them: those of a run, or those that come while it is set aside.

    finished: the loop's thread appends, the engine's takes from the left; it is never another one, else a sample that
    ends while others are taken would be lost.
    """

    running: dict[int, GrowingSample] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    finished: deque[Completion] = field(default_factory=deque)
    failure: Exception | None = None


class Serving:
    """One server at work. Made and used in the loop; `changed` is called there whenever something finishes or fails."""

    def __init__(
        self, home: ServerHome, weights: ServedWeights, bounds: ServingBounds, changed: Callable[[], None]
    ) -> None:
        self._home, self.weights, self._bounds, self._changed = home, weights, bounds, changed
        self._places, self._go = asyncio.Semaphore(bounds.most_requests), asyncio.Event()
        self._go.set()
        self._reviving = asyncio.Lock()
        self._client: SglangClient | None = None
        self._dead: list[SglangClient] = []
        self._newest = weights.version  # to which an update has begun
        self._deaths = 0
        self._progress = time.monotonic()
        self._streams = False
        self._flushes_paused = True  # it forgets its cache while requests wait in it
        self.quantized = False
        self._has_checksums = True
        self._member: tuple[SglangClient, str] | None = None  # the server, and the group that it is a member of
        self.sent = 0  # requests that the server has
        self.free_cache_tokens: int | None = None  # as of a moment ago; None where the server does not say

    async def open(self) -> None:
        """Reach the server. Raises SglangError."""
        await self._reach(None)

    async def close(self) -> None:
        for client in filter(None, (*self._dead, self._client)):
            await client.close()

    async def _reach(self, before: SglangClient | None) -> None:
        self._client = await self._home.reach(self.weights, before)
        server = await self._client.server_info()
        self._streams = server.streams
        self._flushes_paused = server.flushes_paused
        self.quantized = server.quantization is not None
        self._progress = time.monotonic()

    @property
    def client(self) -> SglangClient:
        assert self._client is not None, "open() was not called"
        return self._client

    # --- requests -----------------------------------------------------------------------------------------------------

    def start(self, sample: GrowingSample, requests: Requests) -> None:
        """Generate a sample; it goes to `requests` when it is whole."""
        number = sample.request.id
        requests.running[number] = sample
        requests.tasks[number] = asyncio.create_task(self._run(sample, requests))

    def drawn(self, requests: Requests, since: Mapping[int, int]) -> list[DrawnTokens]:
        """See `RolloutEngine.drawn`. The versions of tokens that come while weights change are known later."""
        found = [(requests.running[number], start) for number, start in since.items() if number in requests.running]
        return [drawn for sample, start in found if (drawn := sample.drawn(start)).n]

    async def abort(self, requests: Requests, ids: list[int]) -> None:
        """Forget these."""
        gone = [number for number in ids if number in requests.running]
        rids = [requests.running.pop(number).rid for number in gone]
        tasks = [requests.tasks.pop(number) for number in gone]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            client = await self._living()
            for rid in filter(None, rids):  # the connections are closed, which the server sees only after seconds
                await client.abort(rid)
        except ServerUnreachable:
            return  # and so are they

    async def _run(self, sample: GrowingSample, requests: Requests) -> None:
        number = sample.request.id
        try:
            async with self._places:
                while not sample.ended:
                    await self._go.wait()
                    await self._generate(sample)
            requests.finished.append(sample.completion())
            del requests.running[number], requests.tasks[number]
            self._deaths = 0
        except Exception as error:  # whatever it is, it ends generation, and who takes is told
            requests.failure = requests.failure or error
        self._changed()

    async def _generate(self, sample: GrowingSample) -> None:
        """One answer of the server, whole or cut off."""
        client, version = await self._living(), self._newest
        if not self._go.is_set():
            return  # an update began while it waited
        self.sent += 1
        try:
            await self._answer(client, sample, version)
        except QueueFull:  # of a request that runs, too: a pause puts them into the queue, as many as that holds
            sample.lost(version)
            await asyncio.sleep(FULL_SECONDS)
        except ServerUnreachable as error:
            sample.lost(version)
            await self._revive(client, error)
        except AnswerWrong as error:
            raise UnreadableAnswer(client.url, "/generate", f"the answer to {sample.rid}: {error}", 200) from error
        finally:
            self.sent -= 1

    async def _answer(self, client: SglangClient, sample: GrowingSample, version: int) -> None:
        request = sample.ask(stream=self._streams)
        sample.asked_version = version
        if not request.stream:
            answer = await client.generate(request)
            self._progress = time.monotonic()
            sample.add(AnswerPart(answer.tokens, answer.logprobs, answer), None)
            return
        async with aclosing(client.stream(request)) as parts:
            async for part in parts:
                self._progress = time.monotonic()
                known = version if self._newest == version else None
                if sample.add(part, known) and sample.stop_here(version):
                    return

    async def watch(self, current: Callable[[], Requests]) -> None:
        """Until cancelled: notice a server that takes requests and gives nothing."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            silent, bounds = time.monotonic() - self._progress, self._bounds
            if not self.sent or not self._go.is_set():
                self._progress = time.monotonic()
            elif silent > (bounds.token_seconds if self._streams else bounds.answer_seconds):
                what = "token" if self._streams else "answer"
                text = f"no {what} in {silent:.0f} s, and {self.sent} requests wait for one"
                current().failure = ServerSilent(self.client.url, "/generate", text)
                self._changed()
                return

    async def watch_cache(self) -> None:
        """Until cancelled: ask for the cache now and then, which nobody waits for."""
        while True:
            try:
                loads = await self.client.load()
                self.free_cache_tokens = sum(one.max_total_num_tokens - one.num_used_tokens for one in loads)
            except SglangError:  # it has no such call, or is away: whoever needs it says so
                self.free_cache_tokens = None
            await asyncio.sleep(LOAD_SECONDS)

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _revive(self, broken: SglangClient, error: ServerUnreachable) -> None:
        """Go on with another server where `broken` is dead. Raises what can't be helped."""
        async with self._reviving:
            if self._client is not broken:
                return  # somebody else has
            self._deaths += 1
            if self._deaths > MOST_DEATHS:
                raise error
            self._dead.append(broken)  # what is on its way by it has to fail by itself
            await self._reach(broken)

    async def _living(self) -> SglangClient:
        """The client of the server; while that is being replaced, of the next one."""
        async with self._reviving:
            return self.client

    async def pause(self) -> None:
        """Stop at the next token, requests with what they have."""
        self._go.clear()
        if self.sent:
            await self._persist(lambda client: client.pause("retract"))

    async def resume(self) -> None:
        """Go on."""
        await self._persist(lambda client: client.resume())
        self._go.set()

    async def update(self, weights: ServedWeights, mode: PauseMode, broadcast: Broadcast | None = None) -> None:
        """Generate under other weights; running requests keep their tokens, and in place their caches. Paused, it stays
        so. broadcast: by which they come; their folder is read where it fails."""
        paused = not self._go.is_set()
        self._go.clear()
        self._newest = weights.version

        async def change(client: SglangClient) -> None:
            if client.version == weights.version:
                return  # it was reached with them
            if mode == "retract" and not self._flushes_paused:
                await self._call_back(client)
            await client.pause(mode)
            if broadcast is not None and await self._received(client, weights, broadcast):
                return
            await client.update_from_disk(weights.folder, weights.version, flush_cache=mode == "retract")

        await self._persist(change)
        self.weights = weights
        if not paused:
            await self.resume()

    async def checksums(self) -> dict[str, str] | None:
        """`rank.tensor` -> the checksum of what the server holds; None where it tells none, which the log says once."""
        if not self._has_checksums:
            return None
        try:
            ranks = await self._persist(lambda client: client.checksums())
        except CallRefused as error:
            self._has_checksums = False
            log.warning("what servers hold is not compared (runtime.verify_weights): %s", error)
            return None
        return {f"{i}.{name}": value for i, rank in enumerate(ranks) for name, value in rank.checksums.items()}

    async def read_again(self) -> None:
        """Have the server read the weights that it has from their folder; requests go on where they were."""
        folder, paused = self.weights.folder, not self._go.is_set()
        self._go.clear()

        async def read(client: SglangClient) -> None:
            if not paused:
                await client.pause("in_place")
            await client.read_again(folder)

        await self._persist(read)
        if not paused:
            await self.resume()

    async def _received(self, client: SglangClient, weights: ServedWeights, broadcast: Broadcast) -> bool:
        """Take weights that are broadcast. False where that has failed and the server lives. Raises SglangError; where
        the server is dead, or stuck, it is started with the new weights next."""
        words, update = broadcast.agreement, broadcast.update
        if words.failure(update) is not None:
            return False
        try:
            await self._receive(client, weights.version, broadcast)
            return True
        except (CallRefused, BroadcastFailed) as error:
            words.fail(update, str(error))
            log.warning("%s reads weights %d from %s: %s", client.url, weights.version, weights.folder, error)
        except SglangError as error:
            words.fail(update, str(error))
            self.weights = weights  # which are whole in their folder
            if isinstance(error, ServerSilent):
                raise ServerUnreachable(client.url, error.endpoint, f"it is given up: {error}") from error
            raise
        self._member = None
        return False

    async def _receive(self, client: SglangClient, version: int, broadcast: Broadcast) -> None:
        """Join the group, where the server has not, and take bucket after bucket. Raises SglangError,
        BroadcastFailed."""
        words, update = broadcast.agreement, broadcast.update
        joined = self._member[1] if self._member is not None and self._member[0] is client else ""
        await asyncio.to_thread(words.post, update, f"{READY}{broadcast.place}", joined)
        group = decode_group(await asyncio.to_thread(words.hear, update, GROUP))
        if group.name != joined:
            self._member = None
            if joined:
                await client.destroy_group(joined)
            place = (broadcast.servers.offset(broadcast.place), broadcast.servers.world)
            joins = client.init_group(BroadcastGroup(HOST, group.port, *place, group.name, broadcast.backend))
            await self._unless_failed(client, broadcast, joins)
            self._member = client, group.name
        announced = await client.begin_update()
        try:
            for bucket in broadcast.buckets:
                dtypes = tuple(str(spec.dtype).removeprefix("torch.") for spec in bucket)
                names, shapes = tuple(spec.name for spec in bucket), tuple(spec.shape for spec in bucket)
                last = bucket is broadcast.buckets[-1]
                taken = BroadcastBucket(names, dtypes, shapes, group.name)
                call = client.update_from_distributed(taken, version if last else None, flush_cache=last)
                await self._unless_failed(client, broadcast, call)
        finally:
            if announced:
                await client.end_update()

    async def _unless_failed(
        self, client: SglangClient, broadcast: Broadcast, call: Coroutine[None, None, None]
    ) -> None:
        """A call in which a server waits for others. Raises ServerSilent where the broadcast has failed elsewhere and
        the server hangs in it."""
        task, failed_at = asyncio.create_task(call), 0.0
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_SECONDS))[0]:
                if (why := broadcast.agreement.failure(broadcast.update)) is None:
                    continue
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > GIVE_UP_SECONDS:
                    raise ServerSilent(client.url, "a broadcast", f"it hangs, though {why}")
            await task
        finally:
            task.cancel()

    async def _call_back(self, client: SglangClient) -> None:
        """Requests come back with the tokens they have, and are sent again after `resume`. Raises SglangError."""
        began, most = time.monotonic(), min(QUIET_SECONDS, self._bounds.token_seconds)
        while self.sent:
            if time.monotonic() - began > most:
                text = f"{self.sent} requests have not come back in {most:.0f} s, though they were aborted"
                raise ServerSilent(client.url, "/abort_request", text)
            await client.abort_all()  # again: one may have been on its way
            await asyncio.sleep(ABORT_SECONDS)

    async def _persist(self, call: Callable[[SglangClient], Awaitable[T]]) -> T:
        """A call to the server; to the next one where it is dead."""
        while True:
            client = await self._living()
            try:
                return await call(client)
            except ServerUnreachable as error:
                await self._revive(client, error)
