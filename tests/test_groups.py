"""Groups with different numbers of samples: numbers, batches, advantages, micro-batches, and simulated runs."""

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.functions import least_samples
from realgraph.graphs.spec import MOST_SAMPLES, Advantage, Function
from realgraph.graphs.steps import Center, Scale, Step
from realgraph.runtime.algorithms.advantages import compute
from realgraph.runtime.batch import Packed
from realgraph.runtime.commands.loads import UnexpectedReply, by_group
from realgraph.runtime.job.cursor import minibatch_groups
from realgraph.runtime.job.sample_ids import group_of, place_of, sample_id, sample_ids
from realgraph.runtime.scheduler.groups.ledger import Group
from realgraph.runtime.scheduler.placement import Batch, ids_of_groups, sources_of_groups, units_of
from realgraph.runtime.scheduler.program import GROUP_OWNER, CallPlan
from realgraph.runtime.train.microbatch import cut
from realgraph.runtime.wire.protocol import Sample
from tests.generating import GENERATING, generating_graph
from tests.shapes import Shape, random_shape
from tests.simulator import Simulator, ended_steps

# --- numbers ----------------------------------------------------------------------------------------------------------


@given(group=st.integers(0, 10**9), place=st.integers(0, MOST_SAMPLES - 1), n=st.integers(0, 50))
def test_a_number_has_its_group_and_its_place(group: int, place: int, n: int) -> None:
    sample = sample_id(group, place)
    assert (group_of(sample), place_of(sample)) == (group, place)
    assert [(group_of(one), place_of(one)) for one in sample_ids(group, n)] == [(group, i) for i in range(n)]


@given(data=st.data())
def test_answers_are_told_apart_by_group_and_each_has_just_its_own_samples(data: st.DataObject) -> None:
    sizes = data.draw(st.dictionaries(st.integers(0, 50), st.sets(st.integers(0, 9), min_size=1), min_size=1))
    expected = {group: [sample_id(group, place) for place in sorted(places)] for group, places in sizes.items()}
    samples = [Sample(number, 5) for numbers in expected.values() for number in numbers]
    found = by_group(data.draw(st.permutations(samples)), expected)
    assert {group: [sample.sample for sample in own] for group, own in found.items()} == expected
    with pytest.raises(UnexpectedReply, match="came with"):
        by_group(samples[1:], expected)
    with pytest.raises(UnexpectedReply, match=r"came with|belongs to none"):
        by_group([*samples, Sample(sample_id(data.draw(st.integers(0, 60)), 10), 5)], expected)


# --- batches ----------------------------------------------------------------------------------------------------------


@st.composite
def members(draw: st.DrawFn) -> list[Group]:
    """Groups of a batch, each of its own size, some of whose samples are left out."""
    groups = []
    for number in sorted(draw(st.sets(st.integers(0, 99), min_size=1, max_size=9))):
        group = Group(number, draw(st.integers(0, 3)), 0)
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
        group.samples = tuple(Sample(sample_id(number, place), length) for place, length in enumerate(lengths))
        gone = draw(st.sets(st.sampled_from(range(len(lengths))), max_size=len(lengths) - 1))
        group.left_out = tuple(sample_id(number, place) for place in sorted(gone))
        group.makers = {"judge": draw(st.integers(4, 6))}
        groups.append(group)
    return groups


def call_of(dp: int, **more: Any) -> CallPlan:
    ranks = tuple((rank,) for rank in range(dp))
    reads: dict[str, tuple[str, ...]] = {GROUP_OWNER: ("tokens",), "judge": ("judge.text",), "values": ("values",)}
    return CallPlan("train", "train", "actor", reads, (), tuple(range(dp)), ranks, **more)


@given(groups=members(), dp=st.integers(1, 5), whole_groups=st.booleans(), n_cuts=st.integers(1, 3))
def test_a_batch_has_what_is_left_of_each_group(groups: list[Group], dp: int, whole_groups: bool, n_cuts: int) -> None:
    left = {group.id: [one for one in group.samples if one.sample not in group.left_out] for group in groups}
    flat = [one for own in left.values() for one in own]
    batch = Batch(3, groups, seed=1)
    assert batch.ids == [one.sample for one in flat]
    assert batch.n_tokens == [one.n_tokens for one in flat]
    batch.own(CallPlan("values", "inference", "critic", {}, (), (7, 8), ((7,), (8,))))
    call = call_of(dp, whole_groups=whole_groups, minibatches=n_cuts, epochs=2)
    cuts = batch.minibatches(call)
    expected = [part for epoch in range(2) for part in minibatch_groups(len(groups), n_cuts, 1, 3, epoch)]
    for found, numbers in zip(cuts, expected, strict=True):
        inside = [one for number in numbers for one in left[groups[number].id]]
        assert sorted(batch.named(position for part in found for position in part)) == [one.sample for one in inside]
        loads = [sum(batch.n_tokens[position] for position in part) for part in found]
        sizes = [sum(one.n_tokens for one in left[groups[number].id]) for number in numbers]
        most = max(sizes if whole_groups else [one.n_tokens for one in inside], default=0)
        assert max(loads) - min(loads) <= most
        if whole_groups:
            homes = Counter(group for part in found for group in {group_of(one) for one in batch.named(part)})
            assert set(homes.values()) <= {1}
    for part, sources in zip(batch.whole(dp, whole_groups), batch.sources_of_ranks(call), strict=True):
        for key in ("tokens", "judge.text", "values"):
            held = [sample for source in sources if key in source.keys for sample in source.samples]
            assert sorted(held) == list(batch.named(part))
    for group in groups:
        at = [position for position, sample in enumerate(batch.ids) if group_of(sample) == group.id]
        assert {batch.owners(GROUP_OWNER)[p] for p in at} == {group.owner}
        holders = {group.owner, group.makers["judge"], *(batch.owners("values")[p] for p in at)}
        assert {worker for worker, held in batch.holdings().items() if group.id in held} == holders
    of_groups = units_of(batch.ids, per_group=True)
    assert [list(unit) for unit in of_groups] == [[one.sample for one in own] for own in left.values()]
    assert units_of(batch.ids, per_group=False) == tuple((one.sample,) for one in flat)


@given(groups=members())
def test_streaming_calls_see_groups_whole(groups: list[Group]) -> None:
    every = [one.sample for group in groups for one in group.samples]
    assert list(ids_of_groups(groups)) == every
    assert [len(unit) for unit in units_of(every, per_group=True)] == [len(group.samples) for group in groups]
    reads: dict[str, tuple[str, ...]] = {GROUP_OWNER: ("text",)}
    for source in sources_of_groups(CallPlan("f", "stream", "", reads, (), ()), groups):
        assert source.samples == ids_of_groups([group for group in groups if group.owner == source.worker])


# --- advantages and micro-batches -------------------------------------------------------------------------------------

Sizes = st.lists(st.integers(2, 6), min_size=1, max_size=6)


def packed(rewards: Sequence[Sequence[float]], rng: random.Random) -> Packed:
    """A batch of groups with these rewards, its samples in any order."""
    pairs = [(group, reward) for group, own in enumerate(rewards) for reward in own]
    rng.shuffle(pairs)
    lengths = tuple(rng.randint(1, 9) for _ in pairs)
    return Packed(
        tokens=torch.zeros(sum(lengths), dtype=torch.int64),
        lengths=lengths,
        mask=torch.ones(sum(lengths), dtype=torch.bool),
        samples=tuple(range(len(pairs))),
        groups=tuple(group for group, _ in pairs),
        sample_keys={"reward": torch.tensor([reward for _, reward in pairs], dtype=torch.float64)},
    )


def grpo(own: Sequence[float]) -> list[float]:
    deviation = statistics.stdev(own) + 1e-6
    return [(reward - statistics.fmean(own)) / deviation for reward in own]


def dr_grpo(own: Sequence[float]) -> list[float]:
    return [reward - statistics.fmean(own) for reward in own]


def rloo(own: Sequence[float]) -> list[float]:
    return [reward - (sum(own) - reward) / (len(own) - 1) for reward in own]


PLAIN: dict[str, tuple[dict[str, Step | None], Any]] = {
    "grpo": ({"center": Center(), "scale": Scale()}, grpo),
    "dr_grpo": ({"center": Center()}, dr_grpo),
    "rloo": ({"center": Center("leave_one_out")}, rloo),
}


@pytest.mark.parametrize("name", PLAIN)
@given(sizes=Sizes, seed=st.integers(0, 10**6))
def test_advantages_of_unequal_groups_are_those_of_each_group_alone(name: str, sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    rewards = [[rng.uniform(-2, 2) for _ in range(size)] for size in sizes]
    steps, plain = PLAIN[name]
    batch = packed(rewards, rng)
    outputs, _, _ = compute(Advantage(steps), batch, {})
    found = [float(piece[0]) for piece in torch.split(outputs["advantages"], list(batch.lengths))]
    expected = {pair: one for own in rewards for pair, one in zip(own, plain(own), strict=True)}
    assert found == pytest.approx([expected[r] for r in batch.sample_keys["reward"].tolist()], rel=1e-4, abs=1e-5)


@given(sizes=Sizes, limit=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_micro_batches_keep_unequal_groups_whole(sizes: list[int], limit: int, seed: int) -> None:
    batch = packed([[0.0] * size for size in sizes], random.Random(seed))
    parts = cut(batch, limit, whole_groups=True)
    assert sorted(i for part in parts for i in part) == list(range(batch.n_samples))
    homes = Counter(group for part in parts for group in {batch.groups[i] for i in part})
    assert set(homes.values()) == {1}
    for part in parts:
        assert sum(batch.lengths[i] for i in part) <= limit or len({batch.groups[i] for i in part}) == 1


# --- simulated runs ---------------------------------------------------------------------------------------------------


def varied_shape(rng: random.Random) -> Shape:
    """Any run whose filter leaves samples out."""
    shape = random_shape(rng)
    shape.algorithm = rng.choice(["grpo", "ppo", "distill", "judge", "retry", "debate"])
    shape.filtered = shape.varied = True
    shape.n = rng.choice([2, 3, 4])
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_runs_of_varied_groups_starve_no_step_and_train_no_group_with_too_few(first: int) -> None:
    n_left_out = n_dropped = n_old = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        shape = varied_shape(rng)
        graph = generating_graph(shape) if shape.algorithm in GENERATING else None
        simulator = Simulator(shape, rng, graph=graph)
        halt = simulator.run()
        assert halt is not None and halt.reason == "finished", (seed, shape, halt)
        least = simulator.graph.least_samples
        steps = ended_steps(simulator)
        assert [step.step for step in steps] == list(range(shape.steps))
        for step in steps:
            assert step.n_groups == shape.groups
            assert shape.groups * least <= step.n_samples == shape.groups * shape.n - step.n_left_out
        trained = [group for group, final in simulator.final.items() if final == "trained"]
        assert all(len(simulator.left(group)) >= least for group in trained)
        few = [g for g in simulator.final if len(simulator.left(g)) < least]
        assert all(simulator.final[group] == "discarded" for group in few)
        if shape.overdue in ("wait", "drop") and shape.algorithm in ("grpo", "ppo"):
            assert max(step.oldest for step in steps) <= shape.staleness
        n_left_out += sum(step.n_left_out for step in steps)
        n_dropped += sum(step.n_dropped for step in steps)
        n_old += sum(step.oldest for step in steps)
    assert n_left_out > 0
    assert n_dropped > 0
    assert n_old > 0


def test_two_are_left_where_they_are_compared_and_all_where_pairs_are() -> None:
    keep = Function("m:f", writes={"keep": "sample  bool"})
    calls: dict[str, Any] = {"filter": keep, "advantage": Advantage({"center": Center("batch")})}
    assert least_samples(calls, 8) == 1
    calls["advantage"] = Advantage({"center": Center()})
    assert [least_samples(calls, n) for n in (1, 2, 8)] == [1, 2, 2]
    assert least_samples({**calls, "filter": Function("m:f", writes={"keep": "group bool"})}, 8) == 1
    assert least_samples({**calls, "filter": Function("m:f", writes={"keep": "sample bool"}, min_samples=5)}, 8) == 5
