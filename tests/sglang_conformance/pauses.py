"""Generation that stops and goes on: retracted, in place, or with an abort."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from realgraph.runtime.engine import Request
from realgraph.runtime.rollout.answers import Answer
from realgraph.runtime.rollout.errors import CallRefused, QueueFull
from tests.rollouts import full_logprobs
from tests.sglang_conformance.subject import (
    LONG,
    MAX_QUEUED,
    OTHER,
    PROMPT,
    SECONDS,
    SHORTER,
    SMALL,
    TOLERANCE,
    Check,
    Subject,
    assert_logprobs,
    assert_tiled,
    request,
)


async def a_retracted_request_goes_on_under_the_new_weights(subject: Subject) -> None:
    before = subject.client.version
    after = next(subject.versions)
    async with subject.generating(SHORTER) as running:
        await subject.client.pause("retract")
        await subject.update(after)
        await subject.client.resume()
        answer = await running.answer()
    assert answer.reason == "length" and len(answer.tokens) == SHORTER and answer.n_retractions == 1
    assert_tiled(answer, [before, after])
    assert_logprobs(answer, PROMPT, 1.0, [SMALL, OTHER])


async def retracted_requests_beyond_the_queue_are_refused(subject: Subject) -> None:
    """They are put into it, and it takes no more of them than of new ones."""
    async with AsyncExitStack() as running:
        requests = [await running.enter_async_context(subject.generating()) for _ in range(MAX_QUEUED + 2)]
        await subject.client.pause("retract")
        await subject.client.abort_all()
        ends = await asyncio.gather(*(one.task for one in requests), return_exceptions=True)
        await subject.client.resume()
    assert sum(isinstance(end, QueueFull) for end in ends) == 2, ends
    assert sum(isinstance(end, Answer) and end.reason == "abort" for end in ends) == MAX_QUEUED, ends


async def several_updates_within_one_answer_are_told_apart(subject: Subject) -> None:
    expected = [subject.client.version]
    async with subject.generating(SHORTER) as running:
        for number in range(3):
            await subject.client.pause("retract")
            expected.append(next(subject.versions))
            await subject.client.update_from_disk(str(subject.folders[number % 2 == 0]), expected[-1])
            before = running.n_tokens
            await subject.client.resume()
            while running.n_tokens < before + 3:
                await asyncio.sleep(0.01)
        answer = await running.answer()
    assert_tiled(answer, expected)
    assert_logprobs(answer, PROMPT, 1.0, [SMALL, OTHER, SMALL, OTHER])


async def in_place_requests_go_on_with_the_old_cache(subject: Subject) -> None:
    before, after = subject.client.version, next(subject.versions)
    async with subject.generating(SHORTER) as running:
        await subject.client.pause("in_place")
        await subject.update(after, flush_cache=False)
        await subject.client.resume()
        answer = await running.answer()
    assert answer.n_retractions == 0
    assert_tiled(answer, [before, after])
    first, second = answer.spans
    expected = full_logprobs(OTHER, Request(0, PROMPT, 1, 0, 1.0), answer.tokens)
    drawn = torch.tensor(answer.logprobs, dtype=torch.float64)
    assert (expected - drawn)[second.start : second.end].abs().mean() > TOLERANCE, "the old cache was not used"
    assert first.end > 0


async def a_cache_that_is_in_use_is_not_flushed(subject: Subject) -> None:
    async with subject.generating():
        await subject.client.pause("in_place")
        with pytest.raises(CallRefused, match="/flush_cache: answered 400"):
            await subject.client.flush_cache()
        with pytest.raises(CallRefused, match="cache"):
            await subject.update(next(subject.versions), flush_cache=True)
        await subject.client.resume()


async def an_aborting_pause_returns_what_there_is(subject: Subject) -> None:
    async with subject.generating() as running:
        await subject.client.pause("abort")
        answer = await running.answer()
        await subject.client.resume()
    assert answer.reason == "abort" and 0 < len(answer.tokens) < LONG


async def requests_wait_while_all_is_paused(subject: Subject) -> None:
    await subject.client.pause("retract")
    waiting = asyncio.create_task(subject.client.generate(request(5)))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await subject.client.resume()
    assert (await asyncio.wait_for(waiting, SECONDS)).reason == "length"


async def a_paused_server_is_alive_and_not_ready(subject: Subject) -> None:
    assert await subject.client.is_ready()
    await subject.client.pause("retract")
    assert not await subject.client.is_ready()
    assert (await subject.client.model_info()).weight_version == str(subject.client.version)
    await subject.client.resume()
    assert await subject.client.is_ready()


async def pausing_and_resuming_twice_is_as_once(subject: Subject) -> None:
    async with subject.generating(SHORTER) as running:
        for _ in range(2):
            await subject.client.pause("retract")
        for _ in range(2):
            await subject.client.resume()
        assert (await running.answer()).reason == "length"


CHECKS: tuple[Check, ...] = (
    a_retracted_request_goes_on_under_the_new_weights,
    retracted_requests_beyond_the_queue_are_refused,
    several_updates_within_one_answer_are_told_apart,
    in_place_requests_go_on_with_the_old_cache,
    a_cache_that_is_in_use_is_not_flushed,
    an_aborting_pause_returns_what_there_is,
    requests_wait_while_all_is_paused,
    a_paused_server_is_alive_and_not_ready,
    pausing_and_resuming_twice_is_as_once,
)
