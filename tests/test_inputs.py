"""Inputs of a call that were fetched ahead are there though their owner is gone since; and what was not is gathered."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import pytest
import torch

from realgraph.runtime.store.assemble import Assembler, Values
from realgraph.runtime.store.bundle import PeerLostError, TransferError
from realgraph.runtime.store.inputs import Inputs
from realgraph.runtime.store.shares import Share
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane
from realgraph.runtime.wire.curve import LOOPBACK, make_keys
from realgraph.runtime.wire.protocol import Execute, Prefetch, SampleSource
from tests.shapes import Shape, graph_of

SAMPLES = (0, 1, 2)


class Reader:
    """Worker 1, which reads what worker 0 holds until it is gone."""

    def __init__(self, stack: ExitStack) -> None:
        self.owned, self.own = Store(1 << 16), Store(1 << 16)
        self._ends = stack.enter_context(ExitStack())
        self.owner = self._ends.enter_context(DataPlane(0, self.owned, make_keys(), LOOPBACK))
        plane = stack.enter_context(DataPlane(1, self.own, make_keys(), LOOPBACK))
        for one in (self.owner, plane):
            one.connect([self.owner.peer, plane.peer])
        self.inputs = Inputs(Assembler(graph_of(Shape()), self.own, plane, 10.0), lambda call, task: None)
        self.tasks = 0

    def fetch(self, *sources: SampleSource) -> None:
        """Worker 1 is to fetch these for the train call of step 0, and has when this returns."""
        assert asyncio.run(self.inputs.prefetch(Prefetch(self._task(), "train", 0, sources), 0.0))

    def read(self, call: str, *sources: SampleSource) -> dict[str, dict[int, float]]:
        """The first number of each value that a call of step 0 reads."""
        command = Execute(self._task(), call, 0, (SAMPLES,), sources)
        self.inputs.begin(command)
        values = self.inputs.take(command)
        return {key: {id: float(value[0]) for id, value in held.items()} for key, held in values.items()}

    def lose_owner(self) -> None:
        """Worker 0 is gone."""
        self._ends.close()

    def _task(self) -> int:
        self.tasks += 1
        return self.tasks


@pytest.fixture
def reader() -> Iterator[Reader]:
    with ExitStack() as stack:
        made = Reader(stack)
        made.owned.put("reward", SAMPLES, [torch.tensor([float(sample)]) for sample in SAMPLES])
        made.own.put("advantages", SAMPLES, [torch.tensor([10.0 + sample]) for sample in SAMPLES])
        stack.callback(made.inputs.close)
        yield made


def rewards(*samples: int) -> SampleSource:
    return SampleSource(0, ("reward",), samples)


ADVANTAGES = SampleSource(1, ("advantages",), SAMPLES)
WHOLE = {"reward": {0: 0.0, 1: 1.0, 2: 2.0}, "advantages": {0: 10.0, 1: 11.0, 2: 12.0}}


def test_what_was_fetched_is_there_though_its_owner_is_gone(reader: Reader) -> None:
    reader.fetch(rewards(*SAMPLES))
    reader.lose_owner()
    assert reader.read("train", rewards(*SAMPLES), ADVANTAGES) == WHOLE


def test_without_a_fetch_an_owner_that_is_gone_is_named(reader: Reader) -> None:
    reader.lose_owner()
    with pytest.raises(TransferError, match="worker 0"):
        reader.read("train", rewards(*SAMPLES), ADVANTAGES)


def test_a_fetch_that_fails_says_so_and_is_made_good_by_the_call_itself(reader: Reader) -> None:
    reader.owned.drop(["reward"], [1])
    with pytest.raises(TransferError, match="worker 0"):
        reader.fetch(rewards(*SAMPLES))
    reader.owned.put("reward", [1], [torch.tensor([1.0])])
    assert reader.read("train", rewards(*SAMPLES), ADVANTAGES) == WHOLE


class Standing:
    """Gathers at once what worker 1 has, and what worker 0 has when it goes on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def gather(self, sources: Sequence[SampleSource], samples: Iterable[int], share: Share | None) -> Values:
        if any(source.worker == 0 for source in sources):
            assert self.goes_on.wait(30.0)
        return {source.keys[0]: {source.samples[0]: torch.ones(1)} for source in sources}


def test_a_worker_that_stands_still_holds_up_only_the_call_that_reads_it() -> None:
    standing = Standing()
    inputs = Inputs(cast("Assembler", standing), lambda call, task: None)
    command = Execute(1, "train", 0, (SAMPLES,), (ADVANTAGES,))

    async def both() -> None:
        waiting = asyncio.create_task(inputs.prefetch(Prefetch(0, "train", 1, (rewards(0),)), 0.0))
        await asyncio.sleep(0)  # it has begun
        inputs.begin(command)
        assert (await asyncio.to_thread(inputs.take, command)).keys() == {"advantages"}
        assert not waiting.done()
        standing.goes_on.set()
        assert await waiting

    asyncio.run(both())
    inputs.close()


class Unreachable:
    """Worker 0 can't be reached when it is asked for sample 0, `times` times."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.shared: list[bool] = []

    def gather(self, sources: Sequence[SampleSource], samples: Iterable[int], share: Share | None) -> Values:
        self.shared.append(share is not None)
        if 0 in samples:
            self.left -= 1
            if self.left >= 0:
                raise PeerLostError(0, "worker 0 is lost: the connection broke")
        return {"reward": dict.fromkeys(samples, torch.ones(1))}


@pytest.fixture
def inputs_of() -> Iterator[Callable[[Unreachable], Inputs]]:
    with ExitStack() as stack:

        def make(gathering: Unreachable) -> Inputs:
            inputs = Inputs(cast("Assembler", gathering), lambda call, task: Share(task, (1, 2)))
            stack.callback(inputs.close)
            return inputs

        yield make


FIRST, SECOND = (Prefetch(sample, "train", 0, (rewards(sample),)) for sample in (0, 1))


def test_a_connection_that_breaks_and_comes_back_costs_no_fetch(inputs_of: Callable[[Unreachable], Inputs]) -> None:
    twice = Unreachable(2)
    inputs = inputs_of(twice)
    assert asyncio.run(inputs.prefetch(FIRST, 60.0))
    assert twice.shared == [True, False, False]  # the other reader may have all by now, and doesn't ask again
    inputs.begin(command := Execute(1, "train", 0, ((0,),), FIRST.sources))
    assert inputs.take(command)["reward"].keys() == {0}


def test_a_worker_that_stays_unreachable_is_named_when_patience_is_over(
    inputs_of: Callable[[Unreachable], Inputs],
) -> None:
    never = Unreachable(1000)
    with pytest.raises(PeerLostError, match="the connection broke"):
        asyncio.run(inputs_of(never).prefetch(FIRST, 1.0))
    assert 1000 - never.left >= 2


def test_of_two_fetches_for_a_call_the_first_ends_without_a_word(inputs_of: Callable[[Unreachable], Inputs]) -> None:
    inputs = inputs_of(Unreachable(1))

    async def both() -> list[bool]:
        first = asyncio.create_task(inputs.prefetch(FIRST, 60.0))
        await asyncio.sleep(0)  # it has begun
        second = await inputs.prefetch(SECOND, 60.0)
        return [await first, second]

    assert asyncio.run(both()) == [False, True]


def test_of_a_batch_that_was_formed_anew_nothing_old_is_read(reader: Reader) -> None:
    reader.fetch(rewards(0, 1))
    reader.owned.put("reward", SAMPLES, [torch.tensor([20.0 + sample]) for sample in SAMPLES])
    assert reader.read("train", rewards(*SAMPLES))["reward"] == {0: 20.0, 1: 21.0, 2: 22.0}


def test_a_later_fetch_for_the_same_call_takes_the_place_of_the_first(reader: Reader) -> None:
    reader.fetch(rewards(0, 1))
    reader.fetch(rewards(*SAMPLES))
    reader.lose_owner()
    assert reader.read("train", rewards(*SAMPLES), ADVANTAGES) == WHOLE
