"""The audit of losses: what the train engine writes of them, and a judge that finds each way to break a promise."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from benchmarks.audit import Judgement, Promise, Start, judge, promise_of
from realgraph.graphs.keys import VERSIONS
from realgraph.graphs.maths import Loss, PairMean, Preference
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainOptions
from realgraph.runtime.job.audit import AuditRecord, AuditSample, AuditSpan
from realgraph.runtime.job.sample_ids import sample_id
from realgraph.runtime.train.passes import AGES_COUNTED
from realgraph.runtime.wire.metrics import Metric
from tests import tiny
from tests.engines import POLICY, call, engine, folder
from tests.generating import GENERATING, generating_graph
from tests.shapes import Shape, job_of

__all__ = ["folder"]

BOUND, TRAINS, N_STEPS, N_SAMPLES, EPOCHS = 2, 2, 6, 8, 2
PROMISE = Promise(BOUND, {"train": TRAINS, "again": TRAINS}, {"train": EPOCHS, "again": EPOCHS}, N_SAMPLES)
Records = list[AuditRecord]


def records_of(rng: random.Random) -> Records:
    """A run that keeps every promise: two ranks, two train calls of two epochs, all ages up to the bound and beyond."""
    records = []
    for step in range(N_STEPS):
        samples = list(range(step * N_SAMPLES, (step + 1) * N_SAMPLES))
        spans = {}
        for sample in samples:
            versions = sorted(rng.randint(0, step * TRAINS + 1) for _ in range(3))
            ages = [step - version // TRAINS for version in versions]
            spans[sample] = tuple(AuditSpan(v, 4, age <= BOUND) for v, age in zip(versions, ages, strict=True))
        for ordinal, name in enumerate(("train", "again")):
            rng.shuffle(samples)
            for worker, own in enumerate((samples[:5], samples[5:])):
                made = tuple(AuditSample(sample, epoch, spans[sample]) for epoch in range(EPOCHS) for sample in own)
                records.append(AuditRecord(name, step, step * TRAINS + ordinal, worker, float(step), made))
    return records


def changed(records: Records, at: int, samples: Callable[[list[AuditSample]], list[AuditSample]]) -> Records:
    new = structs.replace(records[at], samples=tuple(samples(list(records[at].samples))))
    return [*records[:at], new, *records[at + 1 :]]


def too_old(samples: list[AuditSample]) -> list[AuditSample]:
    return [
        structs.replace(one, spans=tuple(structs.replace(span, used=True) for span in one.spans)) for one in samples
    ]


def other_tokens(samples: list[AuditSample]) -> list[AuditSample]:
    return [structs.replace(samples[0], spans=(*samples[0].spans, AuditSpan(9, 1, True))), *samples[1:]]


def to_come(samples: list[AuditSample]) -> list[AuditSample]:
    return [structs.replace(samples[0], spans=(AuditSpan(99, 12, True),)), *samples[1:]]


BROKEN: dict[str, tuple[Callable[[list[AuditSample]], list[AuditSample]], str]] = {
    "old": (too_old, "steps old, 2 are allowed"),
    "to_come": (to_come, "are of weights that were not there: version 99"),
    "lost": (lambda samples: samples[1:], "1 times, not 2"),
    "again": (lambda samples: [*samples, samples[0]], "3 times, not 2"),
    "tokens": (other_tokens, "sampled tokens"),
    "earlier": (lambda samples: [structs.replace(one, sample=one.sample - 8) for one in samples], "and again in step"),
}


def judged(records: Records, starts: tuple[Start, ...] = ()) -> Judgement:
    return judge(records, starts, PROMISE)


def test_the_groups_of_a_step_are_those_that_its_last_making_has_met() -> None:
    def record(step: int, worker: int, time: float, *groups: int) -> AuditRecord:
        samples = tuple(AuditSample(sample_id(group, place), 0, ()) for group in groups for place in (0, 1))
        return AuditRecord("train", step, step, worker, time, samples)

    records = [record(0, 0, 1.0, 5, 0), record(0, 1, 1.0, 1), record(1, 0, 2.0, 2), record(1, 0, 4.0, 3)]
    assert judged(records, (Start(0.0, 0), Start(3.0, 1))).groups == {0: [0, 1, 5], 1: [3]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", BROKEN)
def test_a_kept_promise_passes_and_each_broken_one_is_named_with_its_sample(seed: int, name: str) -> None:
    rng = random.Random(seed)
    records = records_of(rng)
    assert judged(records).problems == ()
    change, text = BROKEN[name]
    old = {(r.step, r.worker) for r in records for s in r.samples if not all(span.used for span in s.spans)}
    at = rng.choice([i for i, r in enumerate(records) if (r.step, r.worker) in old])
    problems = judged(changed(records, at, change)).problems
    assert problems
    numbers = {sample.sample for sample in records[at].samples}
    numbers |= {number - N_SAMPLES for number in numbers} if name == "earlier" else set()
    named = [problem for problem in problems if text in problem]
    assert any(f"sample {number} " in named[0] for number in numbers), problems
    assert all(f"of step {records[at].step}" in one or "again" in one or "in step" in one for one in problems)


def test_a_sample_of_two_versions_is_named_where_new_weights_wait() -> None:
    promise = structs.replace(PROMISE, bound=None, one_version=True)
    first = [structs.replace(one, spans=one.spans[:1]) for one in records_of(random.Random(0))[0].samples]
    kept = changed(records_of(random.Random(0)), 0, lambda samples: first)[:1]
    assert not [text for text in judge(kept, (), promise).problems if "drawn by" in text]
    mixed = structs.replace(first[0], spans=(AuditSpan(0, 4, True), AuditSpan(1, 4, False)))
    problems = judge(changed(kept, 0, lambda samples: [mixed, *samples[1:]]), (), promise).problems
    assert f"train of step 0: sample {mixed.sample} was drawn by versions [0, 1]" in problems


def test_a_rank_whose_record_is_missing_is_noticed() -> None:
    records = records_of(random.Random(0))
    assert judged([record for record in records if (record.worker, record.step) != (1, 3)]).problems == (
        "again of step 3 met 5 samples, not 8",
        "train of step 3 met 5 samples, not 8",
    )


def test_steps_that_a_resumed_run_repeats_count_as_they_were_made_last() -> None:
    first = records_of(random.Random(0))
    second = [structs.replace(record, time=record.time + 10) for record in records_of(random.Random(1))]
    starts = (Start(-1.0, 0), Start(9.0, 3))
    both = [*first, *(record for record in second if record.step >= 3)]
    assert judged(both, starts).problems == ()
    assert judged(both).problems != ()
    assert sum(judged(both, starts).ages["train"].values()) + sum(judged(both, starts).left_out["train"].values()) == (
        N_STEPS * N_SAMPLES * EPOCHS * 12
    )


# --- the engine -------------------------------------------------------------------------------------------------------


def aged(seed: int, version: int) -> Packed:
    """A batch with random rising versions."""
    rng = random.Random(seed)
    batch = tiny.batch(tiny.lengths(6, 20, seed), seed)
    versions: list[int] = []
    for length in batch.lengths:
        versions += sorted(rng.randint(0, version) for _ in range(length))
    keys = {**batch.token_keys, VERSIONS: torch.tensor(versions, dtype=torch.int32)}
    return replace(batch, token_keys=keys)


def assert_shares_by_age(metrics: Mapping[str, Metric], counts: Counter[int], told: int) -> None:
    """Each age up to `told`, AGES_COUNTED at most, by itself, and the older ones together: all of the tokens."""
    found = {name.removeprefix("age_"): one.value for name, one in metrics.items() if name.startswith("age_")}
    ages = range(min(told, AGES_COUNTED) + 1)
    expected = {str(age): counts[age] / counts.total() for age in ages}
    assert found == pytest.approx({**expected, "older": 1.0 - sum(expected.values())})


@pytest.mark.parametrize("trains", [1, 2])
def test_ages_are_told_where_none_is_too_old(folder: Path, trains: int) -> None:
    """As under `overdue: wait`, `drop` and `allow`: the tokens of each age are counted, and all have a part in the
    loss. Without ages, there are none."""
    one, plain = (engine(folder, trains=trains, generator_trains=trains, counted_ages=told) for told in (2, None))
    one.version = plain.version = 5 * trains
    batch = aged(3, 5 * trains)
    metrics, others = one.train(call(POLICY), [batch]), plain.train(call(POLICY), [batch])
    counts = Counter((5 - batch.token_keys[VERSIONS][batch.mask] // trains).tolist())
    assert max(counts) > 2
    assert_shares_by_age(metrics, counts, 2)
    assert "overdue" not in metrics and metrics["loss"] == others["loss"]
    assert not [name for name in others if name.startswith("age_")]


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("loss", ["tokens", "pairs"])
@pytest.mark.parametrize("trains", [1, 2])
@pytest.mark.parametrize("limit", [None, 25])
@pytest.mark.parametrize("told", [0, 3, 40])
def test_the_engine_writes_what_its_loss_has_met(
    folder: Path, more: int, loss: str, trains: int, limit: int | None, told: int
) -> None:
    """Against ages token by token; an engine with another bound than promised is found by its samples."""
    step, bound = 5, 2
    settings: dict[str, Any] = {"max_age": bound + more, "trains": trains, "generator_trains": trains}
    settings |= {"counted_ages": told}
    one = engine(folder, max_tokens_per_microbatch=limit, **settings)
    one.version = step * trains
    batches = [aged(seed, step * trains) for seed in range(2)]
    pairs = Loss({"dpo": Preference()}, PairMean())
    used: list[AuditSample] = []
    metrics = one.train(call(pairs if loss == "pairs" else POLICY), batches, TrainOptions(audit=used))
    assert [(sample.minibatch, sample.sample) for sample in used] == [
        (i, sample) for i in range(len(batches)) for sample in range(6)
    ]
    left = {(one.minibatch, one.sample // 2) for one in used if not all(span.used for span in one.spans)}
    expected_old = set()
    for sample in used:
        batch = batches[sample.minibatch]
        mask = batch.mask.split(list(batch.lengths))[sample.sample]
        versions = batch.token_keys[VERSIONS].split(list(batch.lengths))[sample.sample][mask].tolist()
        assert [span.version for span in sample.spans for _ in range(span.n_tokens)] == versions
        fate = [span.used for span in sample.spans for _ in range(span.n_tokens)]
        fresh = [step - version // trains <= bound + more for version in versions]
        if loss == "tokens":
            assert fate == fresh
        else:
            assert fate == [(sample.minibatch, sample.sample // 2) not in left] * len(fate)
            assert all(fresh) or (sample.minibatch, sample.sample // 2) in left
        if any(u and step - v // trains > bound for u, v in zip(fate, versions, strict=True)):
            expected_old.add(sample.sample)
    counts = Counter[int]()
    for sample in used:
        for span in sample.spans:
            counts[step - span.version // trains] += span.n_tokens
    assert_shares_by_age(metrics, counts, told)
    n_old = sum(n for age, n in counts.items() if age > bound + more)
    # of pairs, young tokens of old ones, too
    assert metrics["overdue"].value == pytest.approx(n_old / counts.total()) or loss == "pairs"
    record = AuditRecord("train", step, step * trains, 0, 0.0, tuple(used))
    problems = judge([record], (), Promise(bound, {"train": trains}, {"train": len(batches)}, 6)).problems
    old = {problem.split("sample ")[1].split()[0] for problem in problems if "steps old" in problem}
    assert old == {str(sample) for sample in expected_old}
    assert bool(more and loss == "tokens") <= bool(old) and (more or not old)


@pytest.mark.parametrize(
    ("shape", "trains"),
    [
        (Shape(), {"train": 1}),
        (Shape(again=True), {"train": 2, "train_again": 2}),
        (Shape("debate"), {"pro_train": 1, "con_train": 1}),
        (Shape("dpo"), {"train": 0}),
    ],
    ids=["grpo", "twice", "debate", "dpo"],
)
def test_samples_age_by_the_train_calls_of_the_role_that_drew_them(shape: Shape, trains: dict[str, int]) -> None:
    """Two roles that generate and learn do not age each other's samples."""
    graph = generating_graph(shape) if shape.algorithm in GENERATING else None
    assert promise_of(job_of(shape, graph=graph)).trains == trains
