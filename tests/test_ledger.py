"""The ledger, the data cursor, and how a batch is cut: each against a slow and obvious oracle."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from realgraph.runtime.commands.tally import StepTally
from realgraph.runtime.commands.tasks import Tasks
from realgraph.runtime.job.cursor import minibatch_groups, permutation, row_of
from realgraph.runtime.job.sample_ids import group_of, sample_id
from realgraph.runtime.scheduler.groups.ledger import Group, Ledger
from realgraph.runtime.scheduler.groups.transitions import (
    GROUP,
    SESSION,
    GroupEvent,
    GroupState,
    IllegalTransition,
    SessionEvent,
    SessionState,
    session_after,
)
from realgraph.runtime.scheduler.placement import Batch, balance
from realgraph.runtime.scheduler.program import GROUP_OWNER, CallPlan
from realgraph.runtime.wire.protocol import Sample

# --- cursor -----------------------------------------------------------------------------------------------------------


@given(n_rows=st.integers(1, 200), seed=st.integers(-5, 2**64), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_every_epoch_visits_every_row_once(n_rows: int, seed: int, epoch: int, shuffle: bool) -> None:
    rows = [row_of(epoch * n_rows + i, n_rows, seed, shuffle) for i in range(n_rows)]
    assert sorted(rows) == list(range(n_rows))
    if not shuffle:
        assert rows == list(range(n_rows))


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_good() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert permutation(8, 7, 0).tolist() == FIRST_ORDER  # a resumed run of a later release must read the same rows


FIRST_ORDER = [4, 7, 6, 5, 3, 0, 2, 1]


def test_a_data_set_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        row_of(0, 0, 0, True)


@given(n=st.integers(1, 40), k=st.integers(1, 8), seed=st.integers(0, 99), step=st.integers(0, 9))
def test_minibatches_hold_every_group_once_in_equal_parts(n: int, k: int, seed: int, step: int) -> None:
    parts = minibatch_groups(n, k, seed, step, 0)
    assert sorted(group for part in parts for group in part) == list(range(n))
    assert len(parts) == k
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == minibatch_groups(n, k, seed, step, 0)


def test_epochs_of_one_step_are_shuffled_anew() -> None:
    assert len({str(minibatch_groups(16, 4, 0, step, epoch)) for step in range(3) for epoch in range(3)}) == 9


# --- shares -----------------------------------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 4096), max_size=80), n_parts=st.integers(1, 17))
def test_balance_loses_nothing_and_is_at_most_one_sequence_apart(weights: list[int], n_parts: int) -> None:
    parts = balance(weights, n_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(weights[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(weights, default=0)


def random_batch(rng: random.Random) -> Batch:
    groups = []
    for number in sorted(rng.sample(range(100), rng.randint(1, 12))):
        group = Group(number, rng.randrange(5), 0)
        places = sorted(rng.sample(range(9), rng.randint(1, 4)))  # some of the group are left
        group.samples = tuple(Sample(sample_id(number, place), rng.randint(1, 50)) for place in places)
        groups.append(group)
    return Batch(3, groups, seed=1)


def call_plan(rng: random.Random, whole_groups: bool, minibatches: int) -> CallPlan:
    ranks = tuple((rank,) for rank in range(rng.randint(1, 6)))
    reads = {GROUP_OWNER: ("tokens", "mask"), "values": ("values",)}
    return CallPlan(
        "train", "train", "actor", reads, (), tuple(r[0] for r in ranks), ranks,
        whole_groups=whole_groups, minibatches=minibatches, epochs=2,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_shares_and_sources_cover_the_batch_exactly(seed: int) -> None:
    rng = random.Random(seed)
    batch, pairs = random_batch(rng), rng.random() < 0.5
    call = call_plan(rng, pairs, rng.randint(1, 3))
    values = CallPlan("values", "inference", "critic", {}, (), (), ((7,), (8,)))
    batch.own(values)
    groups = [group_of(sample) for sample in batch.ids]
    for cut in batch.minibatches(call) if call.minibatches > 1 else [batch.whole(len(call.ranks), pairs)]:
        for part in cut:
            if pairs:
                assert Counter(groups[position] for position in part).items() <= Counter(groups).items()
    whole = batch.whole(len(call.ranks), pairs)
    assert sorted(position for part in whole for position in part) == list(range(len(batch.ids)))
    for part, sources in zip(whole, batch.sources_of_ranks(call), strict=True):
        assert sources == batch.sources(call, part)
        for key in ("tokens", "mask", "values"):
            held = [(sample, s.worker) for s in sources if key in s.keys for sample in s.samples]
            owners = batch.owners("values" if key == "values" else GROUP_OWNER)
            assert sorted(held) == [(batch.ids[p], owners[p]) for p in part]
    holdings = batch.holdings()
    owned = [(worker, p) for owner in (GROUP_OWNER, "values") for p, worker in enumerate(batch.owners(owner))]
    for worker in range(9):
        expected = {groups[p] for owner, p in owned if owner == worker}
        assert set(holdings.get(worker, ())) == expected


# --- the ledger -------------------------------------------------------------------------------------------------------


class Admissions(RuleBasedStateMachine):
    """Random lives of groups, against counts kept by hand."""

    @initialize(
        per_batch=st.integers(1, 5),
        staleness=st.integers(0, 3),
        spare=st.integers(0, 2),
        overdue=st.sampled_from(["mask", "wait", "drop", "allow"]),
        n_steps=st.integers(1, 8),
        surplus=st.sampled_from([0, 0, 1, 3]),
    )
    def begin(self, per_batch: int, staleness: int, spare: int, overdue: str, n_steps: int, surplus: int) -> None:
        ahead = max(0, staleness - spare)
        self.ledger = Ledger(per_batch, staleness, overdue, ahead, surplus)  # type: ignore[arg-type]
        self.overdue, self.n_steps, self.version = overdue, n_steps, 0
        self.final: dict[int, str] = {}
        self.seen: set[int] = set()
        self.batch: list[Group] = []
        self.lost: set[int] = set()  # with their workers, and not admitted anew yet

    @rule(owner=st.integers(0, 3))
    def lose(self, owner: int) -> None:
        own = {group.id for group in self.ledger.live.values() if group.owner == owner}
        numbers = self.ledger.lose(owner)
        assert set(numbers) == own - {group.id for group in self.batch}
        self.lost |= set(numbers)

    @precondition(lambda self: self.batch)
    @rule()
    def put_back(self) -> None:
        self.ledger.put_back(self.batch)
        self.batch = []

    @rule(n=st.integers(1, 6), owner=st.integers(0, 3))
    def admit(self, n: int, owner: int) -> None:
        for _ in range(min(n, self.ledger.room(self.version, self.n_steps))):
            group = self.ledger.admit(owner, self.version)
            assert group.id == min(self.lost, default=len(self.seen))
            self.lost.discard(group.id)
            self.seen.add(group.id)
            n_counted = len(self.seen - self.lost) - sum(final == "discarded" for final in self.final.values())
            n_counted = max(0, n_counted - self.ledger.surplus)  # of those that batches need
            assert (n_counted - 1) // self.ledger.per_batch <= self.version + self.ledger.ahead
            assert n_counted <= self.n_steps * self.ledger.per_batch

    def some(self, which: int, *states: GroupState) -> Group | None:
        groups = [group for group in self.ledger.live.values() if group.state in states]
        return groups[which % len(groups)] if groups else None

    @rule(which=st.integers(0, 99), newer=st.integers(0, 2))
    def generate(self, which: int, newer: int) -> None:
        group = self.some(which, GroupState.ADMITTED)
        if group is not None:
            self.ledger.generated(group, (), min(self.version, group.version + newer))

    @rule(which=st.integers(0, 99))
    def make_ready(self, which: int) -> None:
        group = self.some(which, GroupState.GENERATED)
        if group is not None:
            self.ledger.ready(group)

    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        group = self.some(which, GroupState.ADMITTED, GroupState.GENERATED)
        if group is not None and group.state is GroupState.ADMITTED:
            self.ledger.skip(group)
            self.final[group.id] = "discarded"
        elif group is not None:
            self.ledger.filter_out(group)
            self.final[group.id] = "discarded"

    @precondition(lambda self: not self.batch)
    @rule()
    def train(self) -> None:
        for group in self.ledger.overdue_groups(self.version):
            assert self.version - group.oldest > self.ledger.staleness
            self.final[group.id] = "discarded"
        taken = self.ledger.batch(self.version)
        if taken is None:
            return
        assert len(taken) == self.ledger.per_batch
        left = [group for group in self.ledger.live.values() if group.state is GroupState.READY and group not in taken]
        worst = max((group.oldest, group.id) for group in taken)
        assert all((group.oldest, group.id) > worst for group in left)
        if self.overdue in ("wait", "drop"):
            assert all(self.version - group.oldest <= self.ledger.staleness for group in taken)
        self.batch = taken
        surplus = self.ledger.surplus_groups(self.version)
        assert len(surplus) <= self.ledger.surplus
        for group in surplus:
            assert self.version + 1 - group.version > self.ledger.ahead
            self.ledger.discard_surplus(group)
            self.final[group.id] = "discarded"
        if not self.ledger.ahead:
            assert all(group in taken for group in self.ledger.live.values())  # a synchronous step leaves nothing

    @precondition(lambda self: self.batch)
    @rule()
    def end_step(self) -> None:
        self.ledger.trained(self.batch)
        for group in self.batch:
            assert group.id not in self.final
            self.final[group.id] = "trained"
        self.batch = []
        self.version += 1

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()
            assert set(self.ledger.live) == self.seen - set(self.final) - self.lost
            assert self.ledger.open == tuple(sorted(self.seen - set(self.final)))
            assert self.ledger.n_again == len(self.lost)
            assert self.ledger.n_trained == sum(final == "trained" for final in self.final.values())


Admissions.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestAdmissions = Admissions.TestCase


@given(open_=st.sets(st.integers(0, 30), max_size=8))
def test_a_restored_ledger_admits_the_open_groups_first_under_their_numbers(open_: set[int]) -> None:
    ledger = Ledger(4, 0, "mask")
    ledger.restore(31, sorted(open_), n_trained=31 - len(open_), n_discarded=0)
    ledger.check()
    numbers = [ledger.admit(0, 8).id for _ in range(len(open_) + 2)]
    assert numbers == [*sorted(open_), 31, 32]
    ledger.check()


# --- lives ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(GroupState))
@pytest.mark.parametrize("event", list(GroupEvent))
def test_a_group_moves_by_the_table_or_names_what_it_cannot_be(state: GroupState, event: GroupEvent) -> None:
    group = Group(17, 0, 0)
    group.state = state
    if (state, event) in GROUP:
        group.move(event)
        assert group.state is GROUP[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"group 17 is {state} and cannot be {event}"):
            group.move(event)
        assert group.state is state


def test_every_state_is_reached_and_only_ends_have_no_way_out() -> None:
    assert {*GROUP.values(), GroupState.ADMITTED} == set(GroupState)
    assert set(GroupState) - {state for state, _ in GROUP} == {
        GroupState.TRAINED,
        GroupState.DISCARDED,
        GroupState.LOST,
    }
    assert {event for _, event in GROUP} == set(GroupEvent)
    assert set(SESSION.values()) == {state for state, _ in SESSION} == set(SessionState)
    assert {event for _, event in SESSION} == set(SessionEvent)
    with pytest.raises(IllegalTransition, match="the generate session is closed and cannot be abandoned"):
        session_after(SessionState.CLOSED, SessionEvent.RUN_ENDS_BEFORE)


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_deadline_is_the_earliest_of_what_is_awaited(seed: int) -> None:
    rng, tasks, now = random.Random(seed), Tasks(), 0.0
    watched: dict[int, float] = {}
    for _ in range(200):
        now += rng.random()
        match rng.randrange(4):
            case 0:
                tasks.fly(tasks.open("call", "train", 0, StepTally()), [0], now, rng.uniform(1, 9))
            case 1 if tasks.flying:
                tasks.close(rng.choice(list(tasks.flying.values())))
            case 2:
                worker = rng.randrange(4)
                watched[worker] = now + 5.0
                tasks.watch(worker, now, 5.0)
            case _:
                worker = rng.randrange(4)
                watched.pop(worker, None)
                tasks.unwatch(worker)
        due = [task.deadline for task in tasks.flying.values()] + list(watched.values())
        assert tasks.deadline() == (min(due) if due else None)
        late = tasks.overdue(now)
        assert (late is not None) == bool(due and min(due) <= now)
