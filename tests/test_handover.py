"""Weights of engines in no process group, which trainers put into their stores: what is fetched is what was given, and
messages reach the process that they are meant for."""

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import pytest

pytest.importorskip("torch")

import torch

from realgraph.runtime.parallel.checksums import WeightsDiffer, checksum
from realgraph.runtime.parallel.cuts import Box
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.shares import Shares, shares
from realgraph.runtime.store.bundle import TransferError
from realgraph.runtime.store.mail import Mail
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest, Values
from realgraph.runtime.weights.handover import WeightHandover
from realgraph.runtime.wire.curve import LOOPBACK, make_keys
from realgraph.runtime.wire.protocol import Peer, Reallocate

SHAPES = {"b": (64, 6), "a": (7,), "c": (3, 5, 2)}
WEIGHTS = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
TRAINERS, ENGINE = (1, 2), 5


class Place:
    """A worker without a process: its store, its data plane and its mail. host: of its own, or one for all."""

    def __init__(self, number: int, host: str | None) -> None:
        self.number, self.store = number, Store(1 << 16)
        self.mail = Mail(number, self._deposit)
        self.plane = DataPlane(number, self.store, make_keys(), LOOPBACK, host, self.mail.take)
        self.handover = WeightHandover(self.store, self._gather, self.mail)

    @property
    def peer(self) -> Peer:
        return self.plane.peer

    def _deposit(self, worker: int, data: bytes) -> str:
        try:
            self.plane.deposit(worker, data, 10.0)
        except TransferError as error:  # as a worker does it: the other may have hung up
            return str(error)
        return ""

    def _gather(self, wants: Sequence[GatherRequest]) -> Values:
        return self.plane.gather_now(wants, copy=False)


@pytest.fixture(params=["one host", "several hosts"])
def places(request: pytest.FixtureRequest) -> Iterator[dict[int, Place]]:
    with ExitStack() as stack:
        numbers = (*TRAINERS, ENGINE)
        found = {n: Place(n, f"host {n}" if request.param == "several hosts" else None) for n in numbers}
        for place in found.values():
            stack.enter_context(place.plane)
            stack.callback(place.mail.close)
            place.plane.connect([other.peer for other in found.values()])
        yield found


def held() -> Shares:
    """Two trainers, who hold the rows of one weight in halves and all of the others."""
    half = {n: Box((32 * i, 0), (32, 6)) for i, n in enumerate(TRAINERS)}
    return shares({n: {**WHOLE, "b": half[n]} for n in TRAINERS}, SHAPES)


def work(version: int, process: int = 1) -> Reallocate:
    return Reallocate(1, "actor", "rollout", version, TRAINERS, (ENGINE,), {ENGINE: process})


WHOLE = {name: Box((0,) * len(shape), shape) for name, shape in SHAPES.items()}


def give(
    places: dict[int, Place], version: int, *, sums: bool = True, but: str = "", wants: Mapping[str, Box] = WHOLE
) -> None:
    """Both trainers give the weights times the version. but: a weight of which one is not sent whole. wants: what the
    engine holds."""
    for number in TRAINERS:
        parts = [
            WeightPart(name, box, version * WEIGHTS[name][box.slices])
            for name, boxes in held()[number].items()
            for box in boxes
            if name != but
        ]
        places[number].handover.give(work(version), parts, {ENGINE: wants}, SHAPES if sums else None)


def fetched(places: dict[int, Place], version: int) -> dict[str, torch.Tensor]:
    """All that the engine gets, its checksums compared."""
    came = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    found = places[ENGINE].handover.fetch(work(version), SHAPES, torch.float64, held(), WHOLE)
    for part in found.parts:
        came[part.name][part.box.slices] = part.values
    assert found.arrived.near + found.arrived.far == sum(weight.nbytes for weight in WEIGHTS.values())
    found.compare(lambda: sums_of(came), ENGINE)
    return came


def sums_of(weights: dict[str, torch.Tensor], wants: Mapping[str, Box] = WHOLE) -> torch.Tensor:
    """[weights]: the checksums of boxes of them."""
    parts = [WeightPart(name, box, weights[name][box.slices]) for name, box in wants.items()]
    sums = {part.name: checksum(part, SHAPES[part.name]) for part in parts}
    return torch.stack([sums.get(name, torch.tensor(0)) for name in SHAPES])


def test_what_is_fetched_is_what_was_given(places: dict[int, Place]) -> None:
    """The newest of several updates; the older copies are gone."""
    for version in (1, 2, 3):
        give(places, version)
    came = fetched(places, 3)
    assert all(torch.equal(came[name], 3 * WEIGHTS[name]) for name in SHAPES)
    for number in TRAINERS:
        assert len(places[number].store.ids("weights of rollout")) == sum(map(len, held()[number].values()))
        places[number].handover.withdraw("rollout")
        assert not places[number].store.keys()


def test_a_worker_of_an_engine_that_is_cut_fetches_what_it_holds(places: dict[int, Place]) -> None:
    """Rows 20 to 39 of one weight, of which both trainers have some; all of another; nothing of the third."""
    wants = {"b": Box((20, 0), (20, 6)), "a": WHOLE["a"]}
    give(places, 2, wants=wants)
    found = places[ENGINE].handover.fetch(work(2), SHAPES, torch.float64, held(), wants)
    came = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    n_came = 0
    for part in found.parts:
        came[part.name][part.box.slices] = part.values
        n_came += part.values.numel()
    assert n_came == 20 * 6 + 7
    assert all(torch.equal(came[name][box.slices], 2 * WEIGHTS[name][box.slices]) for name, box in wants.items())
    assert found.arrived.near + found.arrived.far < sum(weight.nbytes for weight in WEIGHTS.values())
    found.compare(lambda: sums_of(came, wants), ENGINE)
    came["b"][21, 3] += 1e-9
    with pytest.raises(WeightsDiffer, match="'b' as it was given"):
        found.compare(lambda: sums_of(came, wants), ENGINE)


def test_a_weight_that_differs_is_named(places: dict[int, Place]) -> None:
    give(places, 1)
    found = places[ENGINE].handover.fetch(work(1), SHAPES, torch.float64, held(), WHOLE)
    wrong = {name: weight.clone() for name, weight in WEIGHTS.items()}
    wrong["c"][1, 2, 0] += 1e-9
    with pytest.raises(WeightsDiffer, match="worker 5 does not have 'c' as it was given"):
        found.compare(lambda: sums_of(wrong), ENGINE)


def test_weights_that_are_not_all_there_are_refused(places: dict[int, Place]) -> None:
    give(places, 1, but="a")
    with pytest.raises(WeightsDiffer, match="have 421 elements, and 414 were given"):
        places[ENGINE].handover.fetch(work(1), SHAPES, torch.float64, held(), WHOLE)


def test_checksums_are_compared_only_where_they_were_given(places: dict[int, Place]) -> None:
    give(places, 1, sums=False)
    found = places[ENGINE].handover.fetch(work(1), SHAPES, torch.float64, held(), WHOLE)
    assert found.sums is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_messages_come_once_in_order_however_often_they_are_tried(seed: int) -> None:
    rng, mails = random.Random(seed), dict[int, Mail]()

    def deposit(to: int, data: bytes) -> str:
        mails[to].take(data)  # it came, but its sender may not know
        return "" if rng.random() < 0.8 else "no answer"

    mails |= {number: Mail(number, deposit) for number in (0, 1)}
    for n in range(5):
        mails[0].send(1, "x" if n % 2 else "y", bytes([n]))
    assert [mails[1].wait(0, "y") for _ in range(3)] == [b"\0", b"\2", b"\4"]
    assert [mails[1].wait(0, "x") for _ in range(2)] == [b"\1", b"\3"]


def test_nothing_is_awaited_from_who_is_gone_nor_told_to_who_comes_after() -> None:
    sent = list[bytes]()

    def deposit(to: int, data: bytes) -> str:
        sent.append(data)
        return "nobody answers"

    mail, came = Mail(0, deposit), list[bytes | None]()
    waiting = threading.Thread(target=lambda: came.append(mail.wait(7, "probe", 1)))
    mail.join(7, 1)
    waiting.start()
    mail.send(7, "weights", b"old")
    mail.give_up(7)
    waiting.join(10)
    assert came == [None]
    mail.send(7, "weights", b"never")
    mail.join(7, 2)
    assert mail.wait(7, "probe", 1) is None  # of the process before

    def arrive(to: int, data: bytes) -> str:
        mail.take(data)
        return ""

    new = Mail(7, arrive, 2)
    new.send(0, "probe", b"new")
    assert mail.wait(7, "probe", 2) == b"new"
    assert all(b"never" not in data for data in sent)


def test_a_message_of_a_new_process_may_come_before_the_word_that_it_is_there() -> None:
    """As from a worker whose server fetches its weights alone: it awaits nothing before it answers."""
    here, arrived = Mail(0, lambda to, data: ""), threading.Semaphore(0)

    def arrive(to: int, data: bytes) -> str:
        here.take(data)
        arrived.release()
        return ""

    before, after = Mail(7, arrive, 1), Mail(7, arrive, 2)
    here.join(7, 1)
    before.send(0, "probe", b"never awaited")
    after.send(0, "probe", b"new")
    after.send(0, "weights", b"of the second")
    assert all(arrived.acquire(timeout=10) for _ in range(3))
    here.give_up(7)
    here.join(7, 2)
    before.send(0, "probe", b"late")
    assert arrived.acquire(timeout=10)
    assert here.wait(7, "probe", 2) == b"new"
    assert here.wait(7, "weights", 2) == b"of the second"
