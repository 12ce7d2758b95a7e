"""Requests that end before their time."""

import asyncio
from contextlib import suppress

from realgraph.runtime.rollout.answers import new_rid
from tests.sglang_conformance.subject import LONG, PROMPT, SMALL, Check, Subject, assert_logprobs, assert_tiled, request


async def an_abort_gives_all_that_was_generated(subject: Subject) -> None:
    async with subject.generating() as running:
        await subject.client.abort(running.asked.rid)
        answer = await running.answer()
    assert answer.reason == "abort" and answer.message
    assert 0 < len(answer.tokens) < LONG
    assert_tiled(answer, [subject.client.version])
    assert_logprobs(answer, PROMPT, 1.0, [SMALL])


async def aborts_go_by_prefix(subject: Subject) -> None:
    first, second = (asyncio.create_task(subject.client.generate(request(LONG, rid=rid))) for rid in ("ab1", "ab10"))
    async with subject.generating() as other:
        await subject.client.abort("ab1")
        answers = await asyncio.gather(first, second)
        assert [answer.reason for answer in answers] == ["abort", "abort"]
        assert not other.task.done()


async def aborts_of_nothing_do_nothing(subject: Subject) -> None:
    async with subject.generating() as running:
        await subject.client.abort(new_rid())
        await asyncio.sleep(0.2)
        assert not running.task.done()


async def an_abort_of_all_ends_all(subject: Subject) -> None:
    async with subject.generating() as first, subject.generating() as second:
        await subject.client.abort_all()
        assert {(await running.answer()).reason for running in (first, second)} == {"abort"}


async def a_waiting_request_that_is_aborted_keeps_its_tokens_and_lacks_counts(subject: Subject) -> None:
    async with subject.generating() as running:
        await subject.client.pause("retract")
        await subject.client.abort(running.asked.rid)
        answer = await running.answer()
        await subject.client.resume()
    assert answer.reason == "abort" and answer.cached_tokens is None and answer.n_retractions is None
    assert len(answer.tokens) >= running.n_tokens > 0
    assert_tiled(answer, [subject.client.version])


async def a_connection_that_is_dropped_aborts_its_request(subject: Subject) -> None:
    async with subject.generating() as running:
        running.task.cancel()
        with suppress(asyncio.CancelledError):
            await running.task
        while (await subject.client.load())[0].num_running_reqs:
            await asyncio.sleep(0.2)


CHECKS: tuple[Check, ...] = (
    an_abort_gives_all_that_was_generated,
    aborts_go_by_prefix,
    aborts_of_nothing_do_nothing,
    an_abort_of_all_ends_all,
    a_waiting_request_that_is_aborted_keeps_its_tokens_and_lacks_counts,
    a_connection_that_is_dropped_aborts_its_request,
)
