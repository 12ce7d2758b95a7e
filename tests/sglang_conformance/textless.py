"""A server that streams new tokens alone and has no tokenizer (`skip_tokenizer_init`): no run uses one."""

import asyncio

from realgraph.runtime.rollout.answers import Answer
from realgraph.runtime.rollout.errors import ServerUnreachable
from tests.sglang_conformance.subject import LONG, MAX_QUEUED, Check, Running, Subject, request

MOST_TRIES = 400  # the abort has to come before the tokens are sent: at about one of four tries


async def streams_of_waiting_requests_that_are_aborted_break_off(subject: Subject) -> None:
    """Those with tokens that are not sent yet: waiting parts of a stream are joined, and the abort alone has a text, so
    there is a KeyError. The server lives on, and answers without a stream are whole."""
    server = await subject.client.server_info()
    assert server.incremental_streaming_output and server.skip_tokenizer_init and not server.streams
    for _ in range(MOST_TRIES):
        streams = [Running(subject.client, request(LONG)) for _ in range(MAX_QUEUED - 1)]  # a pause queues all
        whole = asyncio.create_task(subject.client.generate(request(LONG)))
        for stream in streams:
            await stream.begun.wait()
        await asyncio.gather(subject.client.pause("retract"), subject.client.abort_all())
        ends = await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        await subject.client.resume()
        assert (await whole).reason == "abort"
        broken = [end for end in ends if isinstance(end, ServerUnreachable)]
        assert len(broken) + sum(isinstance(end, Answer) for end in ends) == len(ends), ends
        assert (await subject.client.generate(request(5))).reason == "length"
        if broken:
            return
    raise AssertionError(f"no stream has broken off in {MOST_TRIES} tries")


CHECKS: tuple[Check, ...] = (streams_of_waiting_requests_that_are_aborted_break_off,)
