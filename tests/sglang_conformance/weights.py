"""New weights, by disk and by broadcast, their names and their checksums."""

import pytest

from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import CallRefused
from tests.sglang_conformance.subject import (
    OTHER,
    PROMPT,
    SHORTER,
    SMALL,
    TIMEOUTS,
    Check,
    Subject,
    assert_logprobs,
    assert_tiled,
    request,
)
from tests.sglang_groups import GROUP, Trainer


async def an_update_without_a_pause_waits_for_the_requests(subject: Subject) -> None:
    before, after = subject.client.version, next(subject.versions)
    async with subject.generating(SHORTER) as running:
        await subject.update(after)
        answer = await running.answer()
    assert answer.reason == "length"
    assert_tiled(answer, [before])
    assert_tiled(await subject.client.generate(request(5)), [after])


async def weights_are_named_without_an_abort(subject: Subject) -> None:
    async with subject.generating() as running:
        other = SglangClient(subject.url, subject.key, TIMEOUTS)
        try:
            served = await other.open(next(subject.versions))
        finally:
            await other.close()
        assert (await subject.client.model_info()).weight_version == served.weight_version
        assert not running.task.done()


async def a_folder_that_is_not_there_changes_nothing(subject: Subject) -> None:
    before = await subject.client.checksums()
    version = subject.client.version
    with pytest.raises(CallRefused, match="/update_weights_from_disk: answered 400"):
        await subject.client.update_from_disk(str(subject.folders[0] / "nothing"), next(subject.versions))
    assert await subject.client.checksums() == before
    assert_tiled(await subject.client.generate(request(5)), [version])


async def checksums_tell_weights_apart(subject: Subject) -> None:
    small = await subject.client.checksums()
    await subject.update(next(subject.versions))
    other = await subject.client.checksums()
    await subject.serve_small()
    assert len(small) == subject.tp
    assert await subject.client.checksums() == small
    for one, two in zip(small, other, strict=True):
        assert one.checksums.keys() == two.checksums.keys()
        assert all(one.checksums[name] != two.checksums[name] for name in one.checksums)


async def an_update_flushes_the_prefixes_unless_told_not_to(subject: Subject) -> None:
    prompt = tuple(range(3, 60))
    for flush in (False, True):
        await subject.client.generate(request(1, prompt=prompt))
        await subject.update(next(subject.versions), flush_cache=flush)
        answer = await subject.client.generate(request(1, prompt=prompt))
        assert answer.cached_tokens is not None and (answer.cached_tokens == 0) == flush
    await subject.client.flush_cache()
    assert (await subject.client.generate(request(1, prompt=prompt))).cached_tokens == 0


async def broadcast_weights_are_those_from_disk(subject: Subject) -> None:
    await subject.update(next(subject.versions))
    expected = await subject.client.checksums()
    await subject.serve_small()
    before, after = subject.client.version, next(subject.versions)
    async with Trainer.joined(subject.client, subject.tp) as trainer, subject.generating(SHORTER) as running:
        await subject.client.pause("retract")
        await trainer.send(subject.client, OTHER, after)
        await subject.client.resume()
        answer = await running.answer()
        assert await subject.client.checksums() == expected
    assert_tiled(answer, [before, after])
    assert_logprobs(answer, PROMPT, 1.0, [SMALL, OTHER])


async def weights_are_read_again_under_requests_that_go_on(subject: Subject) -> None:
    expected = await subject.client.checksums()
    async with subject.generating(SHORTER) as running:
        await subject.client.pause("in_place")
        await subject.client.read_again(str(subject.folders[0]))
        await subject.client.resume()
        answer = await running.answer()
    assert await subject.client.checksums() == expected
    assert answer.n_retractions == 0
    assert_tiled(answer, [subject.client.version])
    assert_logprobs(answer, PROMPT, 1.0, [SMALL])


async def broadcasts_have_to_be_announced(subject: Subject) -> None:
    if not await subject.client.begin_update():
        return  # before 0.5.21
    await subject.client.end_update()
    async with Trainer.joined(subject.client, subject.tp) as trainer:
        with pytest.raises(CallRefused, match="begin_weight_update"):
            await subject.client.update_from_distributed(trainer.bucket(OTHER), next(subject.versions))


async def a_group_that_is_not_there_is_refused(subject: Subject) -> None:
    with pytest.raises(CallRefused, match="/destroy_weights_update_group"):
        await subject.client.destroy_group(GROUP + "-unknown")


CHECKS: tuple[Check, ...] = (
    an_update_without_a_pause_waits_for_the_requests,
    weights_are_named_without_an_abort,
    a_folder_that_is_not_there_changes_nothing,
    checksums_tell_weights_apart,
    an_update_flushes_the_prefixes_unless_told_not_to,
    broadcast_weights_are_those_from_disk,
    weights_are_read_again_under_requests_that_go_on,
    broadcasts_have_to_be_announced,
    a_group_that_is_not_there_is_refused,
)
