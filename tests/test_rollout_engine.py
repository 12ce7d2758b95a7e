"""The embedded rollout engine: generation beside its caller, pauses, weights and failures."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from realgraph.runtime.engine import RELEASED, Completion, EngineClosed, Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.models.weights import whole
from tests.rollouts import assert_exact, drained, model, requests, run
from tests.waiting import until

SMALL = model("qwen3")
SECONDS = 60.0  # that any test waits at most


@contextmanager
def opened(
    module: nn.Module = SMALL, limits: RolloutLimits | None = None, notify: Callable[[], None] = lambda: None
) -> Iterator[TorchRolloutEngine]:
    engine = TorchRolloutEngine(ContinuousBatch(module, limits), notify)
    yield engine
    assert engine.close(SECONDS)


class Gate:
    """A batch's decode step that waits where a test says so."""

    def __init__(self, engine: TorchRolloutEngine) -> None:
        self.steps, self.opened, self.inside = 0, threading.Event(), threading.Event()
        self._step = engine._batch.step
        engine._batch.step = self._wait  # type: ignore[method-assign]

    def _wait(self) -> list[Completion]:
        self.inside.set()
        assert self.opened.wait(SECONDS)
        self.steps += 1
        return self._step()


def request(number: int, n: int) -> Request:
    return Request(number, (5, 9, 2), n, seed=number)


def test_the_stream_holds_what_the_batch_would_have_made() -> None:
    wanted = requests(random.Random(3), 14, groups_of=2)
    expected = run(ContinuousBatch(SMALL), wanted)
    told: list[int] = []
    with opened(limits=RolloutLimits(max_running=5), notify=lambda: told.append(1)) as engine:
        for start in range(0, 14, 4):
            engine.submit(wanted[start : start + 4])
        done = drained(engine, 14)
        assert engine.take(0.0) == []
        assert (engine.status().running, engine.status().waiting, engine.status().failure) == (0, 0, None)
    assert {i: one.tokens for i, one in done.items()} == {i: one.tokens for i, one in expected.items()}
    assert 0 < len(told) <= 14
    for asked in wanted:
        assert_exact(SMALL, asked, done[asked.id])


ACTIONS = st.lists(st.sampled_from(["submit", "abort", "pause", "resume", "aside", "switch", "take"]), max_size=25)


@pytest.mark.slow
@settings(max_examples=25)
@given(ACTIONS, st.integers(0, 9), st.integers(1, 5))
def test_random_calls_beside_generation_lose_and_repeat_nothing(actions: list[str], seed: int, running: int) -> None:
    rng = random.Random(seed)
    waiting = requests(rng, 12, longest=12, groups_of=2)
    by_id = {asked.id: asked for asked in waiting}
    done: dict[int, Completion] = {}
    aborted: set[int] = set()
    sent: list[int] = []
    with opened(limits=RolloutLimits(max_running=running)) as engine:
        for action in [*actions, "resume", *["submit"] * 12]:
            match action:
                case "submit":
                    engine.submit(waiting[:2])
                    sent += [asked.id for asked in waiting[:2]]
                    waiting = waiting[2:]
                case "abort":
                    gone = [i for i in rng.sample(sent, min(2, len(sent))) if i not in done]
                    engine.abort([*gone, 777])
                    aborted |= set(gone)
                case "pause":
                    engine.pause()
                case "resume":
                    engine.resume()
                case "aside":
                    with engine.set_aside():
                        engine.submit([request(0, 3)])  # an id that others may have
                        assert len(drained(engine, 1)[0].tokens) == 3
                case "switch":
                    engine.switch(engine.version + 1)
                case _:
                    done |= {one.id: one for one in engine.take(0.01)}
        done |= drained(engine, len(by_id.keys() - aborted - done.keys()))
        assert engine.take(0.0) == []
    assert done.keys() | aborted == by_id.keys()
    assert done.keys().isdisjoint(aborted)
    for i in sorted(done)[:3]:
        assert list(done[i].versions) == sorted(done[i].versions)
        assert_exact(SMALL, by_id[i], done[i])


def test_a_paused_engine_draws_nothing_and_goes_on_after() -> None:
    with opened() as engine:
        gate = Gate(engine)
        gate.opened.set()
        engine.submit([request(1, 60)])
        assert gate.inside.wait(SECONDS)
        engine.pause()
        steps = gate.steps
        time.sleep(0.05)  # in which dozens of steps would run
        assert gate.steps == steps
        engine.resume()
        assert len(drained(engine, 1)[1].tokens) == 60


def test_a_caller_goes_before_the_next_step() -> None:
    with opened() as engine:
        gate = Gate(engine)
        engine.submit([request(1, 90)])
        assert gate.inside.wait(SECONDS)
        paused = threading.Thread(target=engine.pause)
        paused.start()
        assert until(lambda: engine._callers > 0)
        gate.opened.set()
        paused.join(SECONDS)
        assert gate.steps == 1
        engine.resume()
        assert len(drained(engine, 1)[1].tokens) == 90


def test_what_has_finished_before_requests_are_set_aside_is_taken_after() -> None:
    with opened() as engine:
        engine.submit([request(1, 1)])
        assert until(lambda: bool(engine._finished))
        engine.pause()
        with engine.set_aside():
            engine.submit([request(1, 2)])
            assert len(drained(engine, 1)[1].tokens) == 2
        assert engine._paused
        assert [len(one.tokens) for one in engine.take(0.0)] == [1]


def test_new_weights_are_used_from_the_switch_on_and_never_in_part() -> None:
    module, other = model("qwen3", 1), model("qwen3", 2)

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in other.named_parameters():
            time.sleep(0.001)
            yield name, tensor

    with opened(module) as engine:
        gate = Gate(engine)
        gate.opened.set()
        asked = Request(1, (5, 9, 2), 100, seed=1)
        engine.submit([asked])
        assert gate.inside.wait(SECONDS)
        engine.prepare(whole(slowly()))
        steps = gate.steps
        time.sleep(0.03)
        assert gate.steps == steps
        engine.switch(1)
        done = drained(engine, 1)[1]
    assert list(done.versions) == sorted(done.versions)
    assert done.versions[-1] == 1
    new = done.versions.index(1)
    ids = torch.tensor([[*asked.prompt, *done.tokens]])
    with torch.no_grad():
        logprobs = other(input_ids=ids).logits[0, 2:-1].double().log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    assert (torch.tensor(done.logprobs, dtype=torch.float64) - expected)[new:].abs().max() < 1e-4


def test_weights_that_break_off_stop_generation_for_good() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(module.named_parameters()))
        raise ConnectionError("the owner of the weights is gone")

    module = model("qwen3", 1)
    with opened(module) as engine:
        with pytest.raises(ConnectionError):
            engine.prepare(whole(broken()))
        engine.submit([request(1, 3)])
        assert engine.take(0.05) == []
        assert engine.status().waiting == 1
        engine.prepare(whole(module.named_parameters()))
        engine.switch(1)
        assert drained(engine, 1)[1].versions == (1, 1, 1)


def test_a_failure_reaches_who_takes_and_who_submits() -> None:
    module: Any = model("qwen3", 1)
    told = threading.Event()
    with opened(module, notify=told.set) as engine:
        with torch.no_grad():
            module.model.norm.weight.fill_(float("nan"))
        engine.switch(1)
        with engine.set_aside():
            engine.submit([request(7, 3)])
            with pytest.raises(FloatingPointError, match="request 7"):
                engine.take(SECONDS)
        assert engine.status().failure is None  # it was of what ran while others were set aside
        told.clear()
        engine.submit([request(1, 3)])
        assert told.wait(SECONDS)
        with pytest.raises(FloatingPointError, match="request 1"):
            engine.take(0.0)
        with pytest.raises(FloatingPointError):
            engine.submit([request(2, 3)])
        assert isinstance(engine.status().failure, FloatingPointError)


def test_a_closed_engine_says_so_and_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as engine:
        waits = threading.Timer(0.05, lambda: engine.close(SECONDS))
        waits.start()
        with pytest.raises(EngineClosed):
            engine.take(SECONDS)
        waits.join(SECONDS)
        with pytest.raises(EngineClosed):
            engine.submit([request(1, 3)])
    hanging = TorchRolloutEngine(ContinuousBatch(SMALL))
    gate = Gate(hanging)
    hanging.submit([request(1, 3)])
    assert gate.inside.wait(SECONDS)
    monkeypatch.setattr("realgraph.runtime.generate.engine.STEP_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="has not ended"):
        hanging.pause()
    assert not hanging.close(0.05)
    gate.opened.set()
    assert hanging.close(SECONDS)


def test_an_engine_that_gave_all_up_goes_on_when_its_weights_are_back() -> None:
    """Neither caches nor weights have a byte then, and no token is drawn; afterwards the samples are what they were."""
    module = model("qwen3")
    copied = [(name, parameter.detach().clone()) for name, parameter in module.named_parameters()]
    wanted = requests(random.Random(4), 6, groups_of=2)
    expected = run(ContinuousBatch(SMALL), wanted)
    with opened(module) as engine:
        gate = Gate(engine)
        engine.submit(wanted)
        gate.opened.set()
        until(lambda: gate.steps > 2)
        engine.release(weights=False)
        until(lambda: gate.steps > 4)
        engine.release(weights=True)
        steps = gate.steps
        assert engine.version == RELEASED
        assert engine._batch.cache_bytes == 0
        assert sum(parameter.untyped_storage().nbytes() for parameter in module.parameters()) == 0
        time.sleep(0.05)
        assert gate.steps == steps
        engine.prepare(whole(iter(copied)))
        engine.switch(3)
        done = drained(engine, 6)
    assert {i: one.tokens for i, one in done.items()} == {i: one.tokens for i, one in expected.items()}
    assert {one.versions[-1] for one in done.values()} <= {0, 3}
    assert 3 in {version for one in done.values() for version in one.versions}


def test_weights_wait_in_host_memory_between_two_sessions_and_come_back_bit_for_bit() -> None:
    module, wanted = model("qwen3"), requests(random.Random(5), 6, groups_of=2)
    expected = run(ContinuousBatch(SMALL), wanted)

    def held() -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())

    whole_bytes = held()
    with opened(module) as engine:
        engine._batch.weights.offload()
        for _ in range(2):
            assert (held(), engine._batch.cache_bytes) == (0, 0)
            engine.submit(wanted[:3])
            done = drained(engine, 3)
            assert held() == whole_bytes
            engine.submit(wanted[3:])
            done |= drained(engine, 3)
            engine.release(weights=False)
            assert {i: one.tokens for i, one in done.items()} == {i: one.tokens for i, one in expected.items()}
    assert (held(), engine._batch.cache_bytes) == (0, 0)
