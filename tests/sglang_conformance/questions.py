"""Facts that a server tells about itself."""

import asyncio

from tests.sglang_conformance.subject import CONTEXT, MAX_RUNNING, Check, Subject, request
from tests.tiny import VOCABULARY


async def a_server_says_what_it_runs_and_has_to_do(subject: Subject) -> None:
    arguments = await subject.client.server_info()
    assert arguments.version.startswith("0.5.") and arguments.tp_size == subject.tp
    assert arguments.context_length == CONTEXT and arguments.max_running_requests == MAX_RUNNING
    assert (await subject.client.model_info()).model_path == str(subject.folders[0])
    async with subject.generating():
        while not (load := (await subject.client.load())[0]).num_running_reqs:
            await asyncio.sleep(0.1)
        assert load.num_running_reqs == 1 and load.num_waiting_reqs == 0
        assert 0 < load.num_used_tokens <= load.max_total_num_tokens


async def a_server_says_its_vocabulary_unless_it_is_paused(subject: Subject) -> None:
    """Though no answer names it; nothing is generated for it."""
    assert await subject.client.vocabulary() == VOCABULARY
    await subject.client.pause("retract")
    assert await subject.client.vocabulary() is None
    await subject.client.resume()
    assert (await subject.client.load())[0].num_running_reqs == 0
    assert (await subject.client.generate(request(5))).reason == "length"


CHECKS: tuple[Check, ...] = (
    a_server_says_what_it_runs_and_has_to_do,
    a_server_says_its_vocabulary_unless_it_is_paused,
)
