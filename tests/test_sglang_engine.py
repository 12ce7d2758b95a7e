"""The engine over SGLang servers, on the stand-in: its samples, its weights, and what a server may do to it."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.runtime.engine import Completion, EngineClosed, Request
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.models.weights import whole
from realgraph.runtime.rollout import serving
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.rollout.opening.homes import OwnServer
from realgraph.runtime.rollout.samples import GrowingSample
from tests import tiny
from tests.rollouts import drained, requests, run
from tests.sglang_engines import MODELS, SECONDS, assert_exact, folder, given, opened, running, samples, switch
from tests.sglang_server import interpreter, standin
from tests.sglang_standin.server import letters
from tests.waiting import until

__all__ = ["folder"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interpreter(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def own(folder: Path, python: Path, tmp_path: Path) -> Iterator[SglangEngine]:
    """An engine with its own server, in the directory of a run whose worker was killed after an update."""
    (tmp_path / "run" / "sglang-weights-rollout-0" / "weights-1").mkdir(parents=True)
    engine = opened(folder, RolloutSpec(engine="sglang", python=str(python)), tmp_path / "run")
    yield engine
    assert engine.close(SECONDS)
    assert not list(tmp_path.glob("run/*-weights-*"))


def process_of(engine: SglangEngine) -> int:
    home = engine._home
    assert isinstance(home, OwnServer) and home.process is not None
    return home.process.pid


@pytest.mark.slow
def test_samples_are_the_models_through_updates_a_death_and_what_is_set_aside(own: SglangEngine) -> None:
    wanted = [Request(i, (5, 9, 2 + i), 600, seed=i) for i in range(4)]
    own.submit(wanted)
    assert until(lambda: running(own), SECONDS)
    switch(own, 1)
    assert own.version == 1 and until(lambda: running(own, 100), SECONDS)
    own.pause()
    with own.set_aside():
        own.submit([Request(0, (5, 9), 7, seed=0)])
        aside = drained(own, 1)[0]
        assert len(aside.tokens) == 7 and set(aside.versions) == {1}
    own.resume()
    late = Request(4, (5, 9, 2), 600, seed=0)  # begun under the second weights
    own.submit([late])
    assert until(lambda: running(own), SECONDS)
    known = {i: (one.tokens + one.seen)[: len(one.tokens) + one.certain_seen] for i, one in samples(own).items()}
    assert len(known[4]) >= 5 and all(known.values())
    before = process_of(own)
    os.killpg(before, signal.SIGKILL)
    switch(own, 2)
    assert process_of(own) != before
    done = drained(own, 5)
    for request in (*wanted, late):
        assert_exact(request, done[request.id])
        assert {request.id // 4, 2} <= set(done[request.id].versions)  # the last was begun under the second weights
        assert list(done[request.id].tokens[: len(known[request.id])]) == known[request.id]
    assert own.take(0.0) == []
    assert (own.status().running, own.status().waiting) == (0, 0)
    assert len(list(own._staged._folder.glob("weights-*"))) == 1  # those of the server


def test_a_sample_that_ends_while_others_are_taken_is_not_lost(
    own: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread takes, and aborts something, at the very moment at which the server's thread hands over."""
    handed = threading.Event()
    whole_sample = GrowingSample.completion

    def slow(sample: GrowingSample) -> Completion:
        handed.set()
        assert taken.wait(SECONDS)
        return whole_sample(sample)

    monkeypatch.setattr(GrowingSample, "completion", slow)
    for act in (lambda: own.take(0.0), lambda: own.abort([])):
        taken = threading.Event()
        own.submit([Request(0, (5, 9), 3, seed=0)])
        assert handed.wait(SECONDS)
        acting = threading.Thread(target=act)
        acting.start()
        acting.join(0.5)  # an abort goes through the server's thread, which is in `slow`
        taken.set()
        acting.join(SECONDS)
        assert [done.id for done in drained(own, 1).values()] == [0]
        handed.clear()


@pytest.mark.slow
def test_releases_that_do_not_flush_under_requests_are_updated_between_them(
    folder: Path, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would end, and do not say which tokens are of which weights: requests come back first, and go on after."""
    monkeypatch.setenv("SGLANG_STANDIN_RELEASE", "0.5.18")
    engine = opened(folder, RolloutSpec(engine="sglang", python=str(python)), tmp_path / "run")
    wanted = [Request(i, (5, 9, 2 + i), 600, seed=i) for i in range(4)]
    engine.submit(wanted)
    server = process_of(engine)
    for version in (1, 2):
        assert until(partial(running, engine, 150 * version - 100), SECONDS)
        switch(engine, version)
    done = drained(engine, 4)
    for request in wanted:
        assert_exact(request, done[request.id])
        assert set(done[request.id].versions) == {0, 1, 2}
    assert process_of(engine) == server
    assert engine.close(SECONDS)


def test_pauses_hold_and_aborts_forget(own: SglangEngine) -> None:
    own.submit([Request(i, (5, 9, 2), 400, seed=i) for i in range(3)])
    assert until(lambda: running(own), SECONDS)
    own.pause()
    time.sleep(0.3)  # what was on its way
    counts = [len(one.seen) for one in own._requests.running.values()]
    own.abort([0, 77])
    time.sleep(0.3)
    assert [len(one.seen) for one in own._requests.running.values()] == counts[1:]
    own.resume()
    assert drained(own, 2).keys() == {1, 2}
    with pytest.raises(ValueError, match="exceed 2048"):
        own.submit([Request(5, (1,), 2048, seed=0)])
    with pytest.raises(ValueError, match="without top_p and top_k"):
        own.submit([Request(5, (1,), 8, seed=0, top_p=0.5)])
    own.submit([Request(5, (1,), 8, seed=0, temperature=0.0)])
    assert drained(own, 1)[5].logprobs == (0.0,) * 8


def test_greedy_samples_and_their_stops_are_those_of_the_embedded_engine(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(4)
    plain = [Request(one.id, one.prompt, 24, 0, temperature=0.0) for one in requests(rng, 12)]
    texts = {i: letters(one.tokens) for i, one in run(ContinuousBatch(MODELS[0]), plain).items()}
    wanted = []
    for one in plain:
        at = rng.randrange(1, 20)
        strings = (texts[one.id][at : at + 2], "zzzz") if one.id % 2 else ()
        tokens = frozenset() if one.id % 2 else frozenset(rng.sample(range(tiny.VOCABULARY), 4))
        wanted.append(Request(one.id, one.prompt, 24, 0, 0.0, stop_tokens=tokens, stop_strings=strings))
    expected = run(ContinuousBatch(MODELS[0], decode=letters), wanted)
    assert sum(one.finished for one in expected.values()) >= 6
    for arguments in ((), ("--incremental-streaming-output",)):
        with standin(folder, tmp_path, *arguments) as server:
            spec = RolloutSpec(engine="sglang", urls=(server.url,))
            engine = opened(folder, spec, tmp_path / "run")
            engine.submit(wanted)
            done = drained(engine, 12)
            assert engine.close(SECONDS)
        assert done == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("garbage", "/generate.*no such thing"),
        ("500", "/generate.*500"),
        ("nothing", "/generate: no token in"),
        ("version", "/generate.*weights 777"),
    ],
)
def test_servers_that_answer_nonsense_are_named(folder: Path, tmp_path: Path, fault: str, named: str) -> None:
    told: list[int] = []
    with given(folder, tmp_path, silent_seconds=3.0, notify=lambda: told.append(1)) as (server, engine):
        server.fault(fault)
        engine.submit([Request(0, (5, 9, 2), 8, seed=0)])
        with pytest.raises(Exception, match=named):
            drained(engine, 1)
        assert told and engine.status().failure is not None
        with pytest.raises(Exception, match=named):
            engine.submit([Request(1, (5, 9, 2), 8, seed=0)])
        server.fault()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "streams", "named"),
    [
        ("nothing", True, "/generate: no token in"),
        ("nothing", False, "/generate: no answer in"),
        ("no_pause", True, "/pause_generation: no answer in"),
        ("no_update", True, "/update_weights_from_disk: no answer in"),
    ],
)
def test_a_server_that_goes_silent_is_named_before_the_runs_deadline_is_over(
    folder: Path, tmp_path: Path, fault: str, streams: bool, named: str
) -> None:
    """At any call, and by its address; the run's own deadline would name its worker."""
    deadline = 8.0
    with given(folder, tmp_path, streams=streams, deadline_seconds=deadline) as (server, engine):
        engine.prepare(whole((name, values) for name, values in MODELS[1].named_parameters()))
        server.fault(fault)
        began = time.monotonic()
        engine.submit([Request(0, (5, 9, 2), 2000, seed=0)])
        ask = partial(drained, engine, 1) if fault == "nothing" else partial(engine.switch, 1)
        with pytest.raises(Exception, match=f"SGLang server {server.url} {named}"):
            ask()
        assert deadline / 2 - serving.WATCH_SECONDS <= time.monotonic() - began < 2 * deadline
        server.fault()


@pytest.mark.slow
def test_a_queue_that_is_too_short_for_an_update_costs_no_token(folder: Path, tmp_path: Path) -> None:
    """A pause puts running requests into it, and those that it has no place for are refused."""
    short = ("--incremental-streaming-output", "--max-queued-requests", "1")
    with standin(folder, tmp_path, *short) as server:
        engine = opened(folder, RolloutSpec(engine="sglang", urls=(server.url,)), tmp_path / "run")
        wanted = [Request(i, (5, 9, 2 + i), 400, seed=i) for i in range(4)]
        engine.submit(wanted)
        assert until(lambda: len(samples(engine)) == 4 and running(engine, 20), SECONDS)
        known = {i: list(one.seen[: one.certain_seen]) for i, one in samples(engine).items()}
        switch(engine, 1)
        done = drained(engine, 4)
        assert engine.close(SECONDS)
    for request in wanted:
        assert_exact(request, done[request.id])
        tokens = known[request.id]
        assert len(tokens) >= 20 and list(done[request.id].tokens[: len(tokens)]) == tokens


def test_half_a_stream_is_asked_for_again(folder: Path, tmp_path: Path) -> None:
    with given(folder, tmp_path) as (server, engine):
        server.fault("half")
        request = Request(0, (5, 9, 2), 60, seed=0)
        engine.submit([request])
        assert until(lambda: running(engine, 2), SECONDS)
        server.fault()
        assert_exact(request, drained(engine, 1)[0])


@pytest.mark.slow
def test_the_room_in_a_servers_cache_is_in_its_status_where_it_tells(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it before the first request, less while some run; nobody waits for it, and a server may not know it."""
    monkeypatch.setattr(serving, "LOAD_SECONDS", 0.02)
    with given(folder, tmp_path) as (server, engine):
        room = server.ask("/v1/loads")[1]["loads"][0]["max_total_num_tokens"]
        assert until(lambda: engine.status().free_cache_tokens == room, SECONDS)
        engine.submit([Request(i, (5, 9, 2), 400, seed=i) for i in range(3)])
        assert until(lambda: 0 < room - (engine.status().free_cache_tokens or room) < 4000, SECONDS)
        server.fault("no_loads")
        assert until(lambda: engine.status().free_cache_tokens is None, SECONDS)
        assert engine.status().failure is None
        assert len(drained(engine, 3)) == 3


def test_a_closed_engine_says_so(folder: Path, tmp_path: Path) -> None:
    with given(folder, tmp_path) as (_, engine):
        engine.submit([Request(0, (5, 9, 2), 2000, seed=0)])
        assert engine.close(SECONDS)
        with pytest.raises(EngineClosed):
            engine.take(10.0)


def test_servers_that_are_not_what_the_run_needs_are_named(folder: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "llama", "llama", vocab_size=70)
    different = ("--context-length", "32", "--dtype", "bfloat16", "--tp-size", "4", "--ep-size", "2")
    with standin(other, tmp_path, *different) as server:
        spec = RolloutSpec(engine="sglang", urls=(server.url,))
        with pytest.raises(ConfigError) as caught:
            opened(folder, spec, tmp_path / "run")
    texts = [problem.text for problem in caught.value.problems]
    named_ones = ("a llama model", "a vocabulary of 70", "computes in bfloat16", "takes 32 tokens")
    for named in (*named_ones, "4 tensor-parallel ranks", "spreads experts over 2 ranks"):
        assert any(named in text for text in texts), named
    assert {problem.where.path for problem in caught.value.problems} == {"$.rollout.urls[0]"}


def test_a_server_that_never_comes_up_shows_its_log(folder: Path, tmp_path: Path, python: Path) -> None:
    spec = RolloutSpec(engine="sglang", python=str(python), server_args={"no_such_argument": 3})
    with pytest.raises(Exception, match="unrecognized arguments: --no-such-argument=3"):
        opened(folder, spec, tmp_path / "run")


def test_a_server_is_started_with_the_ranks_of_the_plan(folder: Path, tmp_path: Path, python: Path) -> None:
    spec = RolloutSpec(engine="sglang", python=str(python))
    engine = opened(folder, spec, tmp_path / "run", tp=4, ep=2)
    server = engine._call(engine._serving.client.server_info())
    assert (server.tp_size, server.ep_size, server.dp_size, server.pp_size) == (4, 2, 1, 1)
    assert engine.close(SECONDS)


def test_the_arguments_of_a_call_come_before_those_of_all_servers(folder: Path, tmp_path: Path, python: Path) -> None:
    """However they are spelled."""
    own = {"rollout": {"max-running-requests": 5}, "judge": {"max_running_requests": 3}}
    spec = RolloutSpec(
        engine="sglang",
        python=str(python),
        server_args={"max_running_requests": 7, "--context-length": 96},
        call_args=own,
    )
    engine = opened(folder, spec, tmp_path / "run")
    server = engine._call(engine._serving.client.server_info())
    assert (server.max_running_requests, server.context_length) == (5, 96)
    assert engine.close(SECONDS)
