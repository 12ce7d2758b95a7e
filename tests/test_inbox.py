"""The order in which the master hears of failures, of which one may explain another."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from realgraph.runtime.master import inbox as inboxes
from realgraph.runtime.master.inbox import Inbox
from realgraph.runtime.wire.protocol import Done, Failed
from tests.test_rescue import JOB, Survivors

LOST = Failed(1, "train", "PeerLostError: worker 0 is lost", "worker")
UNFETCHED = Failed(1, "train", "PeerLostError: worker 0 is lost", "worker", task=7)
ABSENT = Failed(2, "train", "AbsentError: worker 0 has no 'tokens'", "call", task=8)
DONE = Done(3, 5, "train")


def heard(replies: list[Done | Failed], until: Callable[[list[Any]], bool]) -> list[Any]:
    """The events of replies that are there at once, in order."""

    async def listen() -> list[Any]:
        survivors = Survivors()
        inbox, events = Inbox(cast(Any, survivors), JOB.runtime), list[Any]()
        for reply in replies:
            survivors.reply(reply)
        try:
            async with asyncio.timeout(20):
                while not until(events):
                    events.append(await inbox.next(None))
        finally:
            await inbox.close()
        return events

    return asyncio.run(listen())


def test_what_comes_after_inputs_that_could_not_be_gathered_is_heard_too() -> None:
    """The run may go on: their step may have been put back."""
    assert heard([UNFETCHED, DONE], lambda events: len(events) == 2) == [UNFETCHED, DONE]


def test_inputs_that_could_not_be_gathered_explain_no_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "EXPLAIN_SECONDS", 0.5)
    assert heard([LOST, ABSENT], lambda events: len(events) == 1) == [LOST]
