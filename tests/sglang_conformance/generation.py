"""Answers of /generate, whole and streamed, and refusals of requests."""

import asyncio

import pytest

from realgraph.runtime.rollout.answers import Answer, new_rid
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import CallRefused, QueueFull
from realgraph.runtime.rollout.messages import GenerateRequest, SamplingParams
from tests.sglang_conformance.subject import (
    CONTEXT,
    LONG,
    MAX_QUEUED,
    MAX_RUNNING,
    PROMPT,
    SMALL,
    TIMEOUTS,
    Check,
    Subject,
    assert_logprobs,
    assert_tiled,
    request,
)


async def logprobs_are_of_the_distribution_at_the_temperature(subject: Subject) -> None:
    for temperature in (0.7, 1.0):
        answer = await subject.client.generate(request(200, temperature=temperature))
        assert answer.reason == "length" and len(answer.tokens) == 200
        assert_logprobs(answer, PROMPT, temperature, [SMALL])


async def greedy_answers_have_logprobs_at_temperature_one(subject: Subject) -> None:
    answer = await subject.client.generate(request(50, temperature=0.0))
    assert_logprobs(answer, PROMPT, 1.0, [SMALL])
    again = await subject.client.generate(request(50, temperature=0.0))
    assert again.tokens == answer.tokens


async def truncation_does_not_renormalise_logprobs(subject: Subject) -> None:
    for truncated in (
        SamplingParams(50, 0.7, top_k=4),
        SamplingParams(50, 0.7, top_p=0.6),
        SamplingParams(50, 0.7, min_p=0.3),
    ):
        answer = await subject.client.generate(GenerateRequest(new_rid(), PROMPT, truncated))
        assert_logprobs(answer, PROMPT, 0.7, [SMALL])
        assert max(answer.logprobs) < 0.0


async def the_stop_token_is_part_of_the_answer(subject: Subject) -> None:
    greedy = await subject.client.generate(request(50, temperature=0.0))
    stop = greedy.tokens[10]
    answer = await subject.client.generate(request(50, temperature=0.0, stop_token_ids=(stop,)))
    assert answer.reason == "stop" and answer.matched == stop
    assert answer.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
    assert len(answer.logprobs) == len(answer.tokens)


async def ignoring_the_end_token_ignores_the_stop_tokens_too(subject: Subject) -> None:
    greedy = await subject.client.generate(request(50, temperature=0.0))
    ignoring = request(50, temperature=0.0, stop_token_ids=(greedy.tokens[10],), ignore_eos=True)
    answer = await subject.client.generate(ignoring)
    assert answer.reason == "length" and answer.tokens == greedy.tokens


async def a_stream_is_the_answer_in_parts(subject: Subject) -> None:
    parts = [part async for part in subject.client.stream(request(40, temperature=0.0))]
    whole = await subject.client.generate(request(40, temperature=0.0))
    end = parts[-1].end
    assert end is not None and all(part.end is None for part in parts[:-1])
    assert tuple(token for part in parts for token in part.tokens) == end.tokens == whole.tokens
    assert tuple(value for part in parts for value in part.logprobs) == end.logprobs
    assert_tiled(end, [subject.client.version])
    assert_logprobs(end, PROMPT, 1.0, [SMALL])


async def requests_beyond_the_context_are_refused(subject: Subject) -> None:
    too_long = request(CONTEXT + 1)
    with pytest.raises(CallRefused, match=r"/generate: answered 400 .*context"):
        await subject.client.generate(too_long)
    with pytest.raises(CallRefused, match="context") as streamed:
        _ = [part async for part in subject.client.stream(too_long)]
    assert streamed.value.status == 400 and not isinstance(streamed.value, QueueFull)


async def an_id_that_is_in_use_is_refused(subject: Subject) -> None:
    async with subject.generating() as running:
        with pytest.raises(CallRefused, match="uplicate"):
            await subject.client.generate(request(1, rid=running.asked.rid))


async def a_full_queue_is_said_and_can_be_tried_again(subject: Subject) -> None:
    crowd: list[asyncio.Task[Answer]] = []
    try:
        while not (refused := [task for task in crowd if task.done()]):
            assert len(crowd) <= 2 * (MAX_RUNNING + MAX_QUEUED), "nothing is ever refused"
            crowd.append(asyncio.create_task(subject.client.generate(request(LONG))))
            await asyncio.wait(crowd[-1:], timeout=0.2)
        with pytest.raises(QueueFull, match="queue is full"):
            _ = [part async for part in subject.client.stream(request(1))]
        assert len(crowd) > MAX_RUNNING
        error = refused[0].exception()
        assert isinstance(error, QueueFull) and error.status == 503
    finally:
        await subject.client.abort_all()
        await asyncio.gather(*crowd, return_exceptions=True)
    assert (await subject.client.generate(request(1))).reason == "length"


async def another_key_is_refused(subject: Subject) -> None:
    if not subject.key:
        return  # a server without one takes everybody
    stranger = SglangClient(subject.url, subject.key[:-1] + ("A" if subject.key[-1] != "A" else "B"), TIMEOUTS)
    try:
        with pytest.raises(CallRefused) as refused:
            await stranger.model_info()
        assert refused.value.status == 401 and subject.key not in str(refused.value)
    finally:
        await stranger.close()


CHECKS: tuple[Check, ...] = (
    logprobs_are_of_the_distribution_at_the_temperature,
    greedy_answers_have_logprobs_at_temperature_one,
    truncation_does_not_renormalise_logprobs,
    the_stop_token_is_part_of_the_answer,
    ignoring_the_end_token_ignores_the_stop_tokens_too,
    a_stream_is_the_answer_in_parts,
    requests_beyond_the_context_are_refused,
    an_id_that_is_in_use_is_refused,
    a_full_queue_is_said_and_can_be_tried_again,
    another_key_is_refused,
)
