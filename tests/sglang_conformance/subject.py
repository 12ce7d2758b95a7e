"""A server that is to be checked, and requests on their way to it.

It begins with the weights of `SMALL`; it has a context of `CONTEXT` tokens, runs MAX_RUNNING requests at once and lets
MAX_QUEUED wait. Its environment has a SGLANG_HEALTH_CHECK_TIMEOUT of a few seconds.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from realgraph.runtime.engine import Request
from realgraph.runtime.rollout.answers import Answer, new_rid
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import CallRefused, SglangError
from realgraph.runtime.rollout.messages import GenerateRequest, SamplingParams, Timeouts
from tests import tiny
from tests.rollouts import full_logprobs

CONTEXT = 2048
MAX_RUNNING, MAX_QUEUED = 8, 4
SHAPE: dict[str, Any] = {"max_position_embeddings": CONTEXT, "eos_token_id": None, "tie_word_embeddings": False}
SMALL, OTHER = tiny.network("qwen3", 0, **SHAPE), tiny.network("qwen3", 5, **SHAPE)
PROMPT = (5, 9, 2, 11, 30, 7)
LONG = 1900  # tokens of an answer that is still being generated when something happens to it, and is never finished
SHORTER = 400  # of one that is finished
TOLERANCE = 1e-4  # nats, on average over the tokens of an answer
TIMEOUTS = Timeouts(connect_seconds=10.0, control_seconds=60.0, update_seconds=60.0, answer_seconds=120.0)
SECONDS = 240.0  # of one check
POLL_SECONDS = 0.1


@dataclass
class Subject:
    """A server to check. folders: of SMALL and OTHER. tp: tensor-parallel ranks. versions: the next ones to use."""

    url: str
    key: str = field(repr=False)
    folders: tuple[Path, Path]
    tp: int = 1
    versions: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    client: SglangClient = field(init=False)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Subject"]:
        """A client of the server, which serves SMALL, is not paused and has nothing to do."""
        self.client = SglangClient(self.url, self.key, TIMEOUTS)
        try:
            await self.client.resume()
            await self.client.abort_all()
            await self.client.open(next(self.versions))
            await self._rest()
            await self.serve_small()
            yield self
        finally:
            await self.client.close()

    async def _rest(self) -> None:
        """Wait for the end of requests that were aborted: until then the server refuses to flush its cache."""
        while True:
            try:
                return await self.client.flush_cache()
            except CallRefused:
                await asyncio.sleep(POLL_SECONDS)

    async def serve_small(self) -> None:
        """Back to the first weights, with no cache."""
        await self.client.update_from_disk(str(self.folders[0]), next(self.versions))

    async def update(self, version: int, **options: bool) -> None:
        """To OTHER, by disk."""
        await self.client.update_from_disk(str(self.folders[1]), version, **options)

    @asynccontextmanager
    async def generating(self, n_new: int = LONG, prompt: Sequence[int] = PROMPT) -> AsyncIterator["Running"]:
        """A request of which the first token has come."""
        running = Running(self.client, request(n_new, prompt=tuple(prompt)))
        try:
            await asyncio.wait_for(running.begun.wait(), SECONDS)
            yield running
        finally:
            running.task.cancel()
            with suppress(asyncio.CancelledError, SglangError):
                await running.task


class Running:
    """A request on its way, streamed."""

    def __init__(self, client: SglangClient, asked: GenerateRequest) -> None:
        self.asked = asked
        self.begun = asyncio.Event()
        self.n_tokens = 0
        self.task = asyncio.create_task(self._run(client))

    async def _run(self, client: SglangClient) -> Answer:
        end = None
        async for part in client.stream(self.asked):
            self.n_tokens += len(part.tokens)
            self.begun.set()
            end = part.end
        assert end is not None
        return end

    async def answer(self) -> Answer:
        return await asyncio.wait_for(asyncio.shield(self.task), SECONDS)


Check = Callable[[Subject], Awaitable[None]]


def run(check: Check, subject: Subject) -> None:
    """One check, from start to end."""

    async def checked() -> None:
        async with asyncio.timeout(SECONDS), subject.opened():
            await check(subject)

    asyncio.run(checked())


def request(n_new: int, rid: str = "", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(rid or new_rid(), prompt, SamplingParams(n_new, **sampling))


def assert_logprobs(answer: Answer, prompt: Sequence[int], temperature: float, networks: Sequence[Any]) -> None:
    """Each span's log-probabilities are those of its network, in order."""
    assert len(networks) == len(answer.spans)
    for span, network in zip(answer.spans, networks, strict=True):
        expected = full_logprobs(network, Request(0, tuple(prompt), 1, 0, temperature), answer.tokens)
        drawn = torch.tensor(answer.logprobs, dtype=torch.float64)
        difference = (expected - drawn)[span.start : span.end].abs().mean()
        assert difference <= TOLERANCE, f"{difference:.2e} nats in {span}"


def assert_tiled(answer: Answer, versions: Sequence[int]) -> None:
    """The answer's spans are of these versions, in this order, and cover it."""
    assert [span.version for span in answer.spans] == list(versions)
    edges = [0, *(span.end for span in answer.spans)]
    assert [span.start for span in answer.spans] == edges[:-1] and edges[-1] == len(answer.tokens)
    assert len(answer.logprobs) == len(answer.tokens)
