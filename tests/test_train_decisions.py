"""Decisions of the train engine: which tokens count, when it refuses to train, what a wrong use is told."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realgraph.graphs.maths import (
    ApplyTerm,
    CrossEntropy,
    Decoupled,
    Distill,
    Loss,
    PairMean,
    PairwiseScore,
    PolicyGradient,
    Preference,
    SequenceMean,
    TokenMean,
    Value,
)
from realgraph.runtime.batch import Packed
from realgraph.runtime.logprob_gap import (
    LEAST_TOKENS,
    EngineGap,
    LogprobGap,
    check_engines,
    engine_name,
    gaps_of,
    worst_of,
)
from realgraph.runtime.models.weights import whole
from realgraph.runtime.train.engine import TorchTrainEngine
from realgraph.runtime.train.errors import NumericsError
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.worker.update_gate import PROBE_SAMPLES, GateProbe, engine_gaps
from tests import tiny
from tests.engines import call, engine, folder, optimizer, same, weights_of

__all__ = ["folder"]


def with_behaviour(one: TorchTrainEngine, batch: Packed, off: float = 0.0) -> Packed:
    logprobs = one.inference(batch, "logprobs", 1.0) + off
    return replace(batch, token_keys={**batch.token_keys, "behaviour_logprobs": logprobs})


def test_the_gate_is_passed_anew_at_every_version(folder: Path) -> None:
    """A weight update that failed shows in the first batch of the new version, however many were right before."""
    one = engine(folder, max_logprob_gap=1e-4)
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    before = weights_of(one)
    with pytest.raises(LogprobGap, match=r"0\.3 nats away"):
        one.train(call(), [with_behaviour(one, batch, 0.3)])
    assert same(before, weights_of(one))
    assert one.version == 0
    metrics = one.train(call(), [with_behaviour(one, batch)])
    assert metrics["logprob_gap"].value < 1e-4
    stale = with_behaviour(one, batch, 0.3)
    fresh = {**stale.token_keys, "versions": torch.full_like(stale.token_keys["versions"], 1)}
    before = weights_of(one)
    with pytest.raises(LogprobGap, match=r"step 1.*0\.3 nats away.*0\.0001 are allowed.*weight update"):
        one.train(call(), [replace(stale, token_keys=fresh)])
    assert same(before, weights_of(one))
    older = {**stale.token_keys, "versions": torch.zeros_like(stale.token_keys["versions"])}
    assert "logprob_gap" not in one.train(call(), [replace(stale, token_keys=older)])


@pytest.mark.parametrize("wrong", range(2))
def test_one_of_two_engines_that_is_wrong_is_named_though_the_mean_of_all_is_not(folder: Path, wrong: int) -> None:
    """It has few of the tokens, so that the mean over both is within the limit. Weights stay as they were."""
    one = engine(folder, max_logprob_gap=0.05, engines=(4, 6))
    batch = tiny.batch([*[40] * 9, 60])
    engines = tuple((4, 6)[(i == 9) == (wrong == 1)] for i in range(10))
    off = torch.tensor([0.2 if i == 9 else 0.0 for i in range(10)])[batch.sample_index()]
    right = with_behaviour(one, batch)
    logprobs = right.token_keys["behaviour_logprobs"]
    spoiled = replace(right, token_keys={**right.token_keys, "behaviour_logprobs": logprobs + off})
    before, name = weights_of(one), f"the engine of worker {engines[9]}"
    with pytest.raises(LogprobGap, match=rf"^in step 0 the log-probabilities of {name}, .* 0\.2 nats away") as raised:
        one.train(call(), [replace(spoiled, engines=engines)])
    assert "of 1 other engines none differ" in str(raised.value)
    assert same(before, weights_of(one))
    gap = one.train(call(), [spoiled])["logprob_gap"]  # by engines that nobody knows
    assert isinstance(gap, Mean) and 0.01 < gap.value < 0.05


def test_an_engine_with_few_tokens_is_judged_with_the_others(folder: Path) -> None:
    assert gaps_of([[LEAST_TOKENS - 1.0, 9.0, -50.0, -41.0], [0.0] * 4], (1, 2), 3) == []
    (found,) = gaps_of([[LEAST_TOKENS, 9.0, -50.0, -41.0], [1.0] * 4], (1, 2), 3)
    expected = [total / LEAST_TOKENS for total in (9.0, -50.0, -41.0)]
    assert found == EngineGap("the engine of worker 1", 3, *expected)


def test_the_gap_leaves_tokens_of_older_weights_out(folder: Path) -> None:
    one = engine(folder, max_logprob_gap=1e-4)
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    one.version = 3
    assert "logprob_gap" not in one.train(call(), [batch])  # 0 would say that there is none
    assert not one.gate_passed


def probe_of(one: TorchTrainEngine, worker: int, off: float, seed: int) -> GateProbe:
    """Samples that an engine with the trainer's weights drew, their log-probabilities off by a constant."""
    n_prompt, n_new = 2 + seed % 5, 1 + seed % 3
    tokens = torch.randint(30, (PROBE_SAMPLES, n_prompt + n_new), generator=torch.Generator().manual_seed(seed))
    flat, lengths = tokens.flatten(), (n_prompt + n_new,) * PROBE_SAMPLES
    batch = Packed(flat, lengths, torch.ones_like(flat, dtype=torch.bool), token_keys={})
    logprobs = one.inference(batch, "logprobs", 1.0).double().view_as(tokens)[:, n_prompt:]
    return GateProbe(tokens, logprobs + off, engine_name(worker, ""), one.version)


@pytest.mark.parametrize("seed", range(4))
def test_one_wrong_engine_of_many_stops_the_run_and_is_named(folder: Path, seed: int) -> None:
    """Its gap is its own, whatever the number of engines, their order and the lengths of their probes."""
    one = engine(folder)
    one.version = 5
    n_engines, wrong, off, limit = (1, 2, 7, 16)[seed], (0, 1, 3, 15)[seed], (-1) ** seed * 0.012, 0.01
    offs = [off if worker == wrong else 0.0 for worker in range(n_engines)]
    gaps = engine_gaps(one, [probe_of(one, i, off, 7 * seed + i) for i, off in enumerate(offs)], 1.0)
    assert [gap.engine for gap in gaps] == [f"the engine of worker {i}" for i in range(n_engines)]
    assert [gap.gap for gap in gaps] == pytest.approx([abs(one) for one in offs], abs=1e-5)
    assert [gap.drawn - gap.recomputed for gap in gaps] == pytest.approx(offs, abs=1e-5)
    assert worst_of(gaps) is gaps[wrong]
    figures = rf"the engine of worker {wrong}, which has the weights of version 5, are 0\.012 nats .* 0\.01 are allowed"
    with pytest.raises(LogprobGap, match=figures) as error:
        check_engines(gaps, limit, "after an update", 1.0, agreed=True)
    assert ("other engines none differ" in str(error.value)) == (n_engines > 1)
    check_engines(gaps, 0.013, "after an update", 1.0, agreed=True)
    check_engines([gap for gap in gaps if gap is not gaps[wrong]], limit, "after an update", 1.0, agreed=True)


def test_an_engine_whose_gap_is_no_number_is_the_worst_and_a_server_goes_by_its_address() -> None:
    address = "http://127.0.0.1:30000"
    engines = [engine_name(0, ""), engine_name(1, address), engine_name(2, "")]
    gaps = [EngineGap(name, 3, gap, -1.5, -1.0) for name, gap in zip(engines, (9.0, math.nan, 0.0), strict=True)]
    with pytest.raises(LogprobGap, match=rf"the SGLang server {address} of worker 1.*of 2 other engines 1 differ"):
        check_engines(gaps, 0.01, "after an update", 1.0, agreed=False)


def test_a_pass_without_probes_finds_no_gap(folder: Path) -> None:
    """As a rank makes that has part in others' passes and no engine."""
    assert engine_gaps(engine(folder), [], 1.0) == []


def versions_of(batch: Packed, versions: Tensor) -> Packed:
    return replace(batch, token_keys={**batch.token_keys, "versions": versions.to(torch.int32)})


@pytest.mark.parametrize("ordinal", [0, 1])
def test_ages_are_in_steps_however_often_a_role_is_trained_in_one(folder: Path, ordinal: int) -> None:
    """Two train calls a step of the role that samples, three of another: in step 5, tokens of steps 3 to 5 count."""
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    by_sample = torch.tensor([3, 5, 6, 7, 10, 11])[batch.sample_index()]  # steps 1, 2, 3, 3, 5, 5
    batch = versions_of(batch, by_sample)
    young = replace(batch, mask=batch.mask & (by_sample >= 6))
    for trains in (2, 3):
        one = engine(folder, max_age=2, trains=trains, generator_trains=2)
        other = engine(folder)
        one.version = 5 * trains + ordinal
        metrics = one.train(call(), [batch])
        assert metrics["loss"].value == pytest.approx(other.train(call(), [young])["loss"].value, rel=1e-6)
        assert metrics["overdue"].value == pytest.approx(1 - int(young.mask.sum()) / int(batch.mask.sum()))


LOSSES = {
    "cross_entropy": ("lm", Loss({"ce": CrossEntropy()}, TokenMean())),
    "value": ("value", Loss({"value": Value()}, SequenceMean())),
    "distill": ("lm", Loss({"distill": Distill(teacher="ref_logprobs")}, TokenMean())),
    "dpo": ("lm", Loss({"dpo": Preference()}, PairMean())),
    "reward": ("score", Loss({"pairs": PairwiseScore()}, PairMean())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_overdue_tokens_have_no_part_in_any_loss_over_samples(folder: Path, name: str) -> None:
    """A loss of pairs leaves a pair out whole: half of a sample has no score and no preference."""
    head, loss = LOSSES[name]
    batch = tiny.batch(tiny.lengths(6, 30, 0), group_size=2)
    old = torch.tensor([False, True, False, False, True, True])[batch.sample_index()]
    old &= batch.positions() % 2 == 0
    batch = versions_of(batch, torch.where(old, 1, 3))
    pairs = name in ("dpo", "reward")
    young = batch.select([2, 3]) if pairs else replace(batch, mask=batch.mask & ~old)
    one, other = engine(folder, {"head": head}, max_age=1), engine(folder, {"head": head})
    one.version = 3
    metrics = one.train(call(loss), [batch])
    expected = other.train(call(loss), [young])
    assert metrics["loss"].value == pytest.approx(expected["loss"].value, rel=1e-6)
    assert metrics["grad_norm"].value == pytest.approx(expected["grad_norm"].value, rel=1e-6)
    assert metrics["overdue"].value == pytest.approx(1 - int(young.mask.sum()) / int(batch.mask.sum()))


@pytest.mark.parametrize("name", ["policy", *LOSSES])
def test_a_batch_without_a_token_that_counts_takes_no_optimizer_step(folder: Path, name: str) -> None:
    """Weights stay, and moments do not decay; the call counts as a version all the same, and the schedule goes on."""
    head, loss = LOSSES.get(name, ("lm", call().loss))
    one = engine(folder, {"head": head}, max_age=1, optimizer=optimizer(weight_decay=0.5, warmup_steps=8))
    batch = tiny.batch(tiny.lengths(6, 30, 0), group_size=2)
    one.train(call(loss), [versions_of(batch, torch.zeros(batch.n_tokens))])
    assert one.adam is not None
    before, moment = weights_of(one), one.adam.moments_of("exp_avg")[0].clone()
    one.version = 3
    overdue = versions_of(batch, torch.ones(batch.n_tokens))
    metrics = one.train(call(loss), [overdue, overdue])
    assert same(before, weights_of(one))
    assert torch.equal(moment, one.adam.moments_of("exp_avg")[0])
    assert (one.version, one.optimizer_steps) == (4, 1)
    assert (metrics["overdue"].value, metrics["empty_steps"].value, metrics["optimizer_steps"].value) == (1, 2, 0)
    young = versions_of(batch, torch.full((batch.n_tokens,), 4))
    metrics = one.train(call(loss), [overdue, young])
    assert (metrics["empty_steps"].value, metrics["optimizer_steps"].value, one.optimizer_steps) == (1, 1, 2)
    assert metrics["lr"].value == pytest.approx(call(loss).lr * 5 / 8)  # the fifth step that was due
    assert not same(before, weights_of(one))


def test_overdue_tokens_are_masked(folder: Path) -> None:
    one, other = engine(folder, max_age=1), engine(folder)
    batch = tiny.batch(tiny.lengths(6, 30, 0))
    versions = torch.where(torch.arange(batch.n_tokens) % 2 == 0, 1, 3).to(torch.int32)
    batch = replace(batch, token_keys={**batch.token_keys, "versions": versions})
    one.version = other.version = 3
    metrics = one.train(call(), [batch])
    young = replace(batch, mask=batch.mask & (versions == 3))
    assert metrics["loss"].value == pytest.approx(other.train(call(), [young])["loss"].value, rel=1e-6)
    assert metrics["overdue"].value == pytest.approx(1 - int(young.mask.sum()) / int(batch.mask.sum()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(folder: Path, value: float) -> None:
    one = engine(folder, max_tokens_per_microbatch=20)
    batch = tiny.batch([8, 9, 10])
    before = weights_of(one)
    advantages = batch.token_keys["advantages"].clone()
    advantages[8:17] = value
    with pytest.raises(NumericsError, match="not taken") as caught:
        one.train(call(), [replace(batch, token_keys={**batch.token_keys, "advantages": advantages})])
    assert 1 in caught.value.samples
    assert same(before, weights_of(one))
    one.train(call(), [batch])  # and the engine still works


def test_weights_that_are_not_finite_name_the_sample(folder: Path) -> None:
    one = engine(folder)
    batch = tiny.batch([8, 9, 10])
    tokens = torch.where(batch.tokens == 7, 8, batch.tokens)
    tokens[12] = 7
    poisoned = ((n, t.index_fill(0, torch.tensor([7]), math.nan) if "embed" in n else t) for n, t in one.weights())
    one.load_weights(whole(iter(list(poisoned))), 0)
    with pytest.raises(NumericsError) as caught:
        one.train(call(), [replace(batch, tokens=tokens)])
    assert caught.value.samples  # the head is tied to the embedding: every sample is hit, each is named
    assert set(caught.value.samples) <= {0, 1, 2}


def test_a_decoupled_loss_sees_the_weights_from_before_the_first_step(folder: Path) -> None:
    """Its proximal log-probabilities are those of a plain inference, whichever mini-batch or epoch a sample is in."""
    seen: list[Tensor] = []

    def spy(batch: Packed, outputs: Any) -> Tensor:
        seen.append(torch.where(batch.mask, batch.token_keys["proximal_logprobs"], 0.0))
        return outputs.logprobs * 0

    policy = PolicyGradient(off_policy=Decoupled(cap=1e9))
    loss = Loss({"policy": policy, "spy": ApplyTerm(fn="spy", reads=("proximal_logprobs",))}, TokenMean())
    one = engine(folder, functions={"spy": spy})
    batch = tiny.batch(tiny.lengths(8, 30, 0))
    halves = [batch.select([0, 1, 2, 3]), batch.select([4, 5, 6, 7])]
    again = [batch.select([7, 0, 5, 2]), batch.select([1, 6, 3, 4])]
    expected = torch.where(batch.mask, one.inference(batch, "logprobs", 1.0), 0.0)
    pieces = torch.split(expected, list(batch.lengths))
    one.train(call(loss, epochs=2, minibatches=2), [*halves, *again])
    orders = ([0, 1, 2, 3], [4, 5, 6, 7], [7, 0, 5, 2], [1, 6, 3, 4])
    for found, order in zip(seen, orders, strict=True):
        torch.testing.assert_close(found, torch.cat([pieces[i] for i in order]), rtol=1e-5, atol=1e-5)


def test_wrong_uses_are_refused(folder: Path) -> None:
    frozen = engine(folder, {"trainable": False}, optimizer=None)
    batch = tiny.batch([5, 6])
    with pytest.raises(ValueError, match="frozen"):
        frozen.train(call(), [batch])
    with pytest.raises(ValueError, match="head 'lm'"):
        engine(folder).train(call(Loss({"value": Value()})), [batch])
    with pytest.raises(ValueError, match="without a mini-batch"):
        engine(folder).train(call(), [])
    with pytest.raises(ValueError, match="missing"):
        frozen.load_weights(iter([]), 1)
    with pytest.raises(ValueError, match="unknown"):
        frozen.load_weights(whole(iter([("x", torch.zeros(1))])), 1)
