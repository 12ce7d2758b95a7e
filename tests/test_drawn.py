"""Tokens that engines tell each other: what is known is a beginning of what was drawn, and engines go on from it as if
nothing had been."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import msgspec
import torch

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, FINISHED, TOKENS, VERSIONS
from realgraph.runtime.commands.keepers import MOST_KEEPERS, keeper_of
from realgraph.runtime.data.stops import Stops
from realgraph.runtime.drawn.kept import KeptTokens
from realgraph.runtime.drawn.sharing import TokenSharing
from realgraph.runtime.drawn.tokens import decode_news, encode_news, pack
from realgraph.runtime.engine import Completion
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.generate.rollouts import Peers, Rollouts, Sampling, Texts, Writes
from realgraph.runtime.job.sample_ids import sample_ids
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.store.bundle import PeerLostError
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import NOBODY, Sample
from tests.rollouts import model, requests, run
from tests.shapes import Shape, graph_of

SMALL = model("qwen3")
N, GROUPS, LONGEST = 3, 4, 24


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.booleans()), max_size=12))
def test_what_is_kept_is_always_a_beginning_of_what_was_drawn(pieces: list[tuple[int, int, bool]]) -> None:
    """Messages may be lost, come twice and overlap."""
    whole = pack(7, range(50), [-float(i) for i in range(50)], [i // 10 for i in range(50)])
    kept = KeptTokens()
    for start, n, lost in pieces:
        tokens, logprobs, versions = whole.lists()
        end = start + n
        piece = pack(7, tokens[start:end], logprobs[start:end], versions[start:end], start)
        if not lost:
            kept.take(encode_news(0, [piece], [8]))
    for drawn in kept.pop([7]).values():
        assert drawn.start == 0
        assert drawn.lists() == tuple(values[: drawn.n] for values in whole.lists())


@pytest.mark.parametrize("bad", [{"logprobs": b""}, {"tokens": b"abc", "logprobs": b"abc", "versions": b"abc"}])
def test_messages_that_can_not_be_are_refused(bad: dict[str, bytes]) -> None:
    news = encode_news(0, [msgspec.structs.replace(pack(1, [2, 3], [0.0, 0.0], [1, 1]), **bad)], [])
    with pytest.raises(msgspec.ValidationError, match="sample 1"):
        decode_news(news)


@given(st.integers(0, 1000), st.integers(1, 9), st.data())
def test_keepers_are_others_and_share_what_an_engine_had(group: int, n: int, data: st.DataObject) -> None:
    engines = sorted(data.draw(st.sets(st.integers(0, 40), min_size=n, max_size=n)))
    owner = data.draw(st.sampled_from(engines))
    keepers = {keeper_of(group + i, owner, engines) for i in range(MOST_KEEPERS)}
    assert keepers <= ({*engines} - {owner} or {NOBODY})
    assert len(keepers) == max(1, min(n - 1, MOST_KEEPERS))


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_draws_on_as_the_one_before_would_have(seed: int) -> None:
    """Half of the requests go on elsewhere at a random moment, some of them twice."""
    rng = random.Random(seed)
    wanted = requests(rng, 12, LONGEST, groups_of=3)
    expected = run(ContinuousBatch(SMALL), wanted)
    first, second = ContinuousBatch(SMALL), ContinuousBatch(SMALL)
    first.submit(wanted)
    done = {one.id: one for _ in range(rng.randint(0, LONGEST)) for one in first.step()}
    since = {one.id: rng.randint(0, 2) for one in wanted}
    for part in first.drawn(since):
        assert part.start == since[part.sample]
    drawn = {one.sample: one for one in first.drawn(dict.fromkeys(since, 0))}
    moved = [one for one in wanted if one.id not in done and rng.random() < 0.5]
    first.abort([one.id for one in moved])
    done |= run(second, [replace(one, drawn=drawn.get(one.id)) for one in moved])
    done |= run(first, [])
    assert done.keys() == expected.keys()
    for number, one in done.items():
        assert one.tokens == expected[number].tokens
        assert one.versions == expected[number].versions
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(expected[number].logprobs), atol=1e-5)


class Stepped(TorchRolloutEngine):
    """An engine whose steps the test makes."""

    def _start(self) -> None:
        pass

    def submit(self, requests: Sequence[Any]) -> None:
        self._batch.submit(requests)

    def step(self) -> None:
        self._finished += self._batch.step()

    def take(self, timeout: float) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished


class Worker:
    """A worker that generates, without a process. deaf: it takes no message."""

    def __init__(self, number: int, workers: Mapping[int, "Worker"], one_version: bool = False) -> None:
        self.number, self.workers, self.deaf = number, workers, False
        graph, self.store = graph_of(Shape(n=N)), Store(1 << 16)
        self.kept = KeptTokens()
        self.sharing = TokenSharing(number, self.kept, self.deposit)
        self.sharing._stop.set()  # without its thread
        self.plane = DataPlane(number, self.store, make_keys(), "127.0.0.1")
        self.engine = Stepped(ContinuousBatch(SMALL))
        sampling = Sampling(N, LONGEST, 1.0, 1.0, 0, Stops(frozenset(range(8))))
        texts, writes = Texts(lambda tokens: str(list(tokens))), Writes.of(graph, "rollout")
        assembler = Assembler(graph, self.store, self.plane, 10.0)
        peers = Peers(self.sharing, one_version)
        self.rollouts = Rollouts("rollout", self.engine, sampling, "prompt", assembler, texts, writes, peers=peers)
        self.made: set[int] = set()
        self.reported: list[Sample] = []

    def deposit(self, to: int, data: bytes) -> str:
        if self.workers[to].deaf:
            return "it is gone"
        self.workers[to].kept.take(data)
        return ""

    def submit(self, groups: Sequence[int], keepers: Sequence[int]) -> None:
        self.rollouts.submit({group: (5, 9, 2 + group) for group in groups}, seed=3)
        self.rollouts.keep(dict(zip(groups, keepers, strict=True)))

    def advance(self) -> None:
        self.engine.step()
        made = self.rollouts.collect(self.number)
        self.made |= set(made.groups if made is not None else ())
        self.reported += made.samples if made is not None else ()

    def tell(self) -> None:
        self.rollouts.share()
        self.sharing.send()

    def samples(self, groups: Sequence[int]) -> dict[int, list[Any]]:
        keys = (TOKENS, VERSIONS, BEHAVIOUR_LOGPROBS, FINISHED)
        ids = [sample for group in groups for sample in sample_ids(group, N)]
        return {i: [self.store.get(key, i).tolist() for key in keys] for i in ids}

    def close(self) -> None:
        self.plane.close()
        self.store.close()


def undisturbed(groups: Sequence[int]) -> dict[int, list[Any]]:
    alone = Worker(0, {})
    alone.submit(groups, [NOBODY] * len(groups))
    while alone.made != set(groups):
        alone.advance()
    found = alone.samples(groups)
    alone.close()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_groups_of_a_lost_engine_end_as_if_it_had_lived(seed: int) -> None:
    """At any moment, after any messages: finished and unfinished samples, groups that had ended and some that had not.
    Every token that was told is drawn once."""
    rng = random.Random(seed)
    groups = list(range(GROUPS))
    workers: dict[int, Worker] = {}
    workers |= {number: Worker(number, workers) for number in range(3)}
    lost, kept = workers[0], [rng.choice([1, 2]) for _ in groups]
    lost.submit(groups, kept)
    for _ in range(rng.randint(0, LONGEST + 3)):
        lost.advance()
        if rng.random() < 0.3:
            lost.tell()
        if rng.random() < 0.1:  # other workers keep some from here on
            group = rng.choice(groups)
            kept[group] = 3 - kept[group]
            lost.rollouts.keep({group: kept[group]})
    told = sum(one.n for worker in workers.values() for one in worker.kept._kept.values())
    for number in (1, 2):
        own = [group for group in groups if kept[group] == number]
        workers[number].submit(own, [3 - number] * len(own))
        workers[number].made |= set()
        while not workers[number].made >= set(own):
            workers[number].advance()
    expected = undisturbed(groups)
    for group in groups:
        found = workers[kept[group]].samples([group])
        for sample, (tokens, versions, logprobs, finished) in found.items():
            assert [tokens, versions, finished] == [expected[sample][0], expected[sample][1], expected[sample][3]]
            assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected[sample][2]), atol=1e-5)
    assert told == 0 or sum(len(one.kept) for one in workers.values()) <= GROUPS * N
    for worker in workers.values():
        worker.close()


def test_what_is_over_is_forgotten_by_who_keeps_it() -> None:
    workers: dict[int, Worker] = {}
    workers |= {number: Worker(number, workers) for number in range(2)}
    workers[0].submit([0, 1, 2], [1, 1, 1])
    for _ in range(5):
        workers[0].advance()
    workers[0].tell()
    assert len(workers[1].kept) == 3 * N
    workers[0].rollouts.over([0])
    workers[0].rollouts.abort([1])
    workers[0].tell()
    assert len(workers[1].kept) == N
    workers[1].kept.forget(2)
    assert len(workers[1].kept) == N
    workers[1].kept.forget(0)
    assert len(workers[1].kept) == 0
    for worker in workers.values():
        worker.close()


def test_a_keeper_that_is_gone_holds_nobody_up_and_a_new_one_is_told_all() -> None:
    workers: dict[int, Worker] = {}
    workers |= {number: Worker(number, workers) for number in range(3)}
    workers[0].submit([0], [1])
    workers[1].deaf = True
    while workers[0].made != {0}:
        workers[0].advance()
        workers[0].tell()
    workers[0].rollouts.keep({0: 2})
    workers[0].tell()
    assert {one.ended for one in workers[2].kept._kept.values()} == {True}
    assert len(workers[2].kept) == N
    for worker in workers.values():
        worker.close()


def test_where_samples_are_of_one_version_tokens_of_others_are_drawn_again() -> None:
    """But for samples that have ended."""
    workers: dict[int, Worker] = {}
    workers |= {number: Worker(number, workers, one_version=True) for number in range(2)}
    workers[0].submit([0, 1], [1, 1])
    for _ in range(LONGEST // 2):
        workers[0].advance()
    workers[0].tell()
    ended = {one.sample for one in workers[1].kept._kept.values() if one.ended}
    workers[1].engine._batch.weights_changed(1)
    workers[1].submit([0, 1], [NOBODY, NOBODY])
    while workers[1].made != {0, 1}:
        workers[1].advance()
    for sample, (_, versions, _, _) in workers[1].samples([0, 1]).items():
        assert set(versions) <= {-1, 0 if sample in ended else 1}
    for worker in workers.values():
        worker.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_is_reported_with_the_versions_of_its_tokens(seed: int) -> None:
    """Under weights that change while it is drawn, some of which an engine never had."""
    rng, worker, version, groups = random.Random(seed), Worker(0, {}), 3 * seed, list(range(GROUPS))
    worker.submit(groups, [NOBODY] * GROUPS)
    while worker.made != set(groups):
        worker.engine._batch.weights_changed(version)
        for _ in range(rng.randint(1, 4)):
            worker.advance()
        version += rng.randint(1, 2)
    drawn = {sample: [one for one in keys[1] if one >= 0] for sample, keys in worker.samples(groups).items()}
    assert drawn.keys() == {one.sample for one in worker.reported}
    assert any(len(set(versions)) > 2 for versions in drawn.values())
    for one in worker.reported:
        assert sum(one.by_version) == one.n_new_tokens
        for number in range(version + 2):
            assert one.n_before(number) == sum(of < number for of in drawn[one.sample])
    worker.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_message_is_taken_when_the_call_returns_on_either_route(far: bool) -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> None:
        decode_news(data)
        taken.append(data)

    here, there = make_keys(), make_keys()
    with (
        DataPlane(0, Store(1 << 16), here, "127.0.0.1", "a") as sender,
        DataPlane(1, Store(1 << 16), there, "127.0.0.1", "b" if far else "a", take) as receiver,
    ):
        for plane in (sender, receiver):
            plane.connect([sender.peer, receiver.peer])
        news = encode_news(0, [pack(1, range(10_000), [0.0] * 10_000, [1] * 10_000)], [2, 3])
        for _ in range(3):
            sender.deposit(1, news, 10.0)
        assert taken == [news] * 3
        with pytest.raises((PeerLostError, TimeoutError)):
            sender.deposit(1, b"garbage", 1.0)
        sender.deposit(1, news, 10.0)
    assert taken == [news] * 4


def test_a_worker_begins_to_share_once_another_can_keep_its_tokens() -> None:
    """It was the only engine when it got the group; then another one came."""
    told = list[int]()

    def deposit(to: int, data: bytes) -> str:
        told.append(to)
        return ""

    sharing = TokenSharing(0, KeptTokens(), deposit)
    sharing.begin(3, sample_ids(3, N), NOBODY)
    sharing.end(pack(next(iter(sample_ids(3, N))), [1, 2], [-1.0, -2.0], [0, 0]))
    assert sharing._thread is None
    assert sharing.keep(3, 5)
    assert sharing._thread is not None and sharing._thread.is_alive()
    sharing.send()
    assert told == [5]
    sharing.close(5.0)
