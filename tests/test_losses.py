"""Losses against slow formulas written as loops, exact expectations, and splits of a batch."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from realgraph.graphs import maths
from realgraph.graphs.maths import OUTPUTS, Loss, Term
from realgraph.runtime.algorithms.estimators import kl, segment_sum, suffix_sums
from realgraph.runtime.algorithms.loss_terms import surrogate
from realgraph.runtime.algorithms.losses import LossNeeds, denominator, evaluate, needs
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.wire.metrics import Metric, merge
from tests.slow_losses import AGGREGATES, DTYPE, FUNCTIONS, PAIR_TERMS, TERMS, grads, make, part, slow_loss


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", TERMS)
def test_a_loss_is_the_papers_formula(name: str, aggregate: str) -> None:
    for seed in range(3):
        batch, outputs = make(seed)
        loss = Loss({name: TERMS[name]}, AGGREGATES[aggregate])
        scalar, metrics = evaluate(loss, batch, outputs, denominator(loss, batch), FUNCTIONS)
        expected = slow_loss(loss, batch, outputs)
        assert float(scalar.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert metrics["loss"].value == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert metrics[f"{name}_loss"].value == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert all(math.isfinite(metric.value) for metric in metrics.values())


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", [name for name in TERMS if name != "cispo"])
def test_gradients_are_finite_differences(name: str, aggregate: str) -> None:
    """`cispo` is left out: by definition its gradient is not that of its value; its own is tested below."""
    batch, outputs = make(7)
    loss = Loss({name: TERMS[name]}, AGGREGATES[aggregate])
    whole = denominator(loss, batch)
    found = grads(evaluate(loss, batch, outputs, whole, FUNCTIONS)[0], outputs)
    generator = torch.Generator().manual_seed(1)
    for k, field in enumerate(OUTPUTS):
        direction = torch.randn(len(found[k]), generator=generator, dtype=DTYPE)

        def shifted(h: float, field: str = field, direction: Tensor = direction) -> float:
            moved = {n: getattr(outputs, n).detach() + (h * direction if n == field else 0) for n in OUTPUTS}
            return float(evaluate(loss, batch, Outputs(**moved), whole, FUNCTIONS)[0])

        slope = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
        assert float(found[k] @ direction) == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", [*TERMS, *PAIR_TERMS, "sum"])
@pytest.mark.parametrize("seed", range(4))
def test_the_parts_of_a_batch_add_up_to_the_whole(name: str, seed: int) -> None:
    """Any split into micro-batches, empty ones too: loss, gradients, metrics and denominators."""
    batch, outputs = make(seed, n=8)
    rng = random.Random(seed)
    if name in PAIR_TERMS:
        loss, unit = Loss({name: PAIR_TERMS[name]}, maths.PairMean()), 2
    elif name == "sum":
        terms: dict[str, Term] = {"policy": TERMS["decoupled"], "kl": TERMS["kl_k3"], "entropy": TERMS["entropy"]}
        loss, unit = Loss(terms, rng.choice(list(AGGREGATES.values()))), 1
    else:
        loss, unit = Loss({name: TERMS[name]}, rng.choice(list(AGGREGATES.values()))), 1
    whole = denominator(loss, batch)
    expected, merged = evaluate(loss, batch, outputs, whole, FUNCTIONS)
    blocks = [list(range(i, i + unit)) for i in range(0, 8, unit)]
    rng.shuffle(blocks)
    cut = sorted(rng.sample(range(len(blocks) + 1), 2))
    parts = [
        [i for block in blocks[a:b] for i in block] for a, b in ((0, cut[0]), (cut[0], cut[1]), (cut[1], len(blocks)))
    ] + [[]]
    pieces = [part(batch, outputs, indices) for indices in parts]
    torch.testing.assert_close(sum(denominator(loss, piece) for piece, _ in pieces), whole, rtol=0, atol=0)
    results = [evaluate(loss, piece, out, whole, FUNCTIONS) for piece, out in pieces]
    total = torch.stack([scalar for scalar, _ in results]).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-15)
    for mine, theirs in zip(grads(total, outputs), grads(expected, outputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
    added: dict[str, Metric] = {}
    for _, metrics in results:
        merge(added, metrics)
    for key, metric in merged.items():
        assert added[key].value == pytest.approx(metric.value, rel=1e-12, abs=1e-14), key


@pytest.mark.parametrize("name", [*TERMS, *PAIR_TERMS])
def test_an_empty_mask_and_an_empty_batch_give_zero_with_a_graph(name: str) -> None:
    batch, outputs = make(1)
    silent = Packed(**{**vars(batch), "mask": torch.zeros_like(batch.mask)})
    aggregates = [maths.PairMean()] if name in PAIR_TERMS else list(AGGREGATES.values())
    for aggregate in aggregates:
        loss = Loss({"a": (TERMS | PAIR_TERMS)[name]}, aggregate)
        cases = [part(batch, outputs, [])] + ([] if name == "pairwise_score" else [(silent, outputs)])
        for empty, out in cases:
            whole = denominator(loss, empty)
            scalar, metrics = evaluate(loss, empty, out, whole, FUNCTIONS)
            assert scalar.requires_grad
            assert all(math.isfinite(mean.value) for mean in metrics.values())
            assert all(bool((g == 0).all()) for g in grads(scalar, outputs))
            if name != "preference" or not empty.n_samples:  # two empty samples are a draw: log 2
                assert float(scalar.detach()) == 0.0


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    batch, outputs = make(5)
    assert outputs.logprobs is not None
    term = maths.PolicyGradient(clip=maths.StopGradient(0.01, 0.01))
    loss = Loss({"policy": term})
    whole = denominator(loss, batch)
    found = grads(evaluate(loss, batch, outputs, whole)[0], outputs)[0]
    ratio = (outputs.logprobs.detach() - batch.token_keys["behaviour_logprobs"]).exp().clamp(0.99, 1.01)
    expected = torch.where(batch.mask, -ratio * batch.token_keys["advantages"] / whole, 0.0)
    torch.testing.assert_close(found, expected)
    clipped = (ratio == 1.01) | (ratio == 0.99)
    assert bool((found[clipped & batch.mask] != 0).all())


def test_without_proximal_logprobs_the_ratio_is_one_and_the_gradient_is_not_zero() -> None:
    """Decoupled PPO at the first optimizer step: gradient = weight x A x grad log p."""
    batch, outputs = make(2)
    assert outputs.logprobs is not None
    keys = {name: value for name, value in batch.token_keys.items() if name != "proximal_logprobs"}
    batch = Packed(**{**vars(batch), "token_keys": keys})
    loss = Loss({"policy": maths.PolicyGradient(off_policy=maths.Decoupled(1.3))})
    scalar, metrics = evaluate(loss, batch, outputs, denominator(loss, batch))
    assert metrics["ratio"].value == pytest.approx(1.0)
    assert metrics["clip_fraction"].value == 0.0
    weight = (outputs.logprobs.detach() - keys["behaviour_logprobs"]).exp()
    weight = torch.where(weight > 1.3, 0.0, weight)
    expected = torch.where(batch.mask, -weight * keys["advantages"] / batch.mask.sum(), 0.0)
    torch.testing.assert_close(grads(scalar, outputs)[0], expected)
    share = float((batch.mask & (weight == 0)).sum() / batch.mask.sum())
    assert metrics["masked_share"].value == pytest.approx(share)


@pytest.mark.parametrize("kind", ["decoupled", "truncated"])
@pytest.mark.parametrize("seed", range(5))
def test_the_policy_that_drew_the_tokens_is_measured_before_any_cap(kind: str, seed: int) -> None:
    """Over micro-batches that merge: KL(behaviour || proximal) by k3, and the two means of an effective sample size."""
    batch, outputs = make(seed)
    off_policy = maths.Decoupled(1.01) if kind == "decoupled" else maths.Truncated(1.01)
    loss = Loss({"policy": maths.PolicyGradient(off_policy=off_policy)})
    _, metrics = evaluate(loss, batch, outputs, denominator(loss, batch))
    keys = batch.token_keys
    log_ratio = (keys["proximal_logprobs"] - keys["behaviour_logprobs"]).double()[batch.mask]
    ratio = log_ratio.exp()
    expected = {"behaviour_kl": ratio - 1 - log_ratio, "behaviour_ratio": ratio, "behaviour_ratio_square": ratio**2}
    for name, values in expected.items():
        assert metrics[name].value == pytest.approx(float(values.mean())), name
    n_effective = ratio.sum() ** 2 / ratio.square().sum()
    mean, square = (metrics[name].value for name in ("behaviour_ratio", "behaviour_ratio_square"))
    assert mean**2 / square * len(ratio) == pytest.approx(float(n_effective))


@pytest.mark.parametrize("seed", range(20))
def test_clip_fraction_counts_the_tokens_without_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(64, generator=generator, dtype=DTYPE).mul(0.5).requires_grad_()
    advantage = torch.randn(64, generator=generator, dtype=DTYPE)
    clip = maths.TwoSided(0.2, 0.28, dual=2.0 if seed % 2 else None)
    losses, clipped = surrogate(clip, log_ratio, advantage, log_ratio)
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
    assert torch.equal(gradient == 0, clipped)


@pytest.mark.parametrize("seed", range(5))
def test_kl_estimators_and_distillation_by_exact_expectation(seed: int) -> None:
    """Over a vocabulary of 7, expectations are sums: k1 and k3 are unbiased, and the mean gradients are the stated."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=DTYPE).requires_grad_()
    other = torch.randn(7, generator=generator, dtype=DTYPE).log_softmax(0)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp()
    reverse, forward = (p * (logprobs - other)).sum(), (other.exp() * (other - logprobs)).sum()
    for estimator in ("k1", "k3"):
        assert float((p * kl(logprobs, other, estimator)).sum().detach()) == pytest.approx(float(reverse.detach()))
    assert bool((kl(logprobs, other, "k3") >= 0).all())
    batch = Packed(
        torch.arange(7), (7,), torch.ones(7, dtype=torch.bool), token_keys={"teacher": other}, groups=(0,), samples=(0,)
    )
    cases = ((maths.Distill("teacher"), reverse), (maths.Distill("teacher", "forward"), forward))
    for term, divergence in cases:
        (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
        found = torch.zeros_like(logits)
        for token in range(7):  # the loss of one sampled token, weighed by its probability
            one = batch.mask & (torch.arange(7) == token)
            loss = Loss({"distill": term})
            single = Packed(**{**vars(batch), "mask": one})
            scalar, _ = evaluate(loss, single, Outputs(logprobs=logprobs), denominator(loss, single))
            found += p[token].detach() * torch.autograd.grad(scalar, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_pair_losses_are_the_papers_formulas_whatever_the_order() -> None:
    for seed in range(5):
        batch, outputs = make(seed)
        order = random.Random(seed).sample(range(6), 6)
        batch, outputs = part(batch, outputs, order)
        assert outputs.logprobs is not None
        assert outputs.scores is not None
        gap = torch.where(batch.mask, outputs.logprobs - batch.token_keys["ref_logprobs"], 0.0).detach()
        index = batch.sample_index()
        sums = [float(gap[index == i].sum()) for i in range(6)]
        scores, dpo, rm = outputs.scores.tolist(), 0.0, 0.0
        for group in range(3):
            first, second = batch.samples.index(100 + 2 * group), batch.samples.index(101 + 2 * group)
            dpo += math.log1p(math.exp(-0.1 * (sums[first] - sums[second]))) / 3
            rm += math.log1p(math.exp(-(scores[first] - scores[second]))) / 3
        for term, expected in ((maths.Preference(), dpo), (maths.PairwiseScore(), rm)):
            loss = Loss({"pair": term}, maths.PairMean())
            scalar, metrics = evaluate(loss, batch, outputs, denominator(loss, batch))
            assert float(scalar.detach()) == pytest.approx(expected, rel=1e-12)
            assert 0.0 <= metrics["accuracy"].value <= 1.0


def test_explained_variance_can_be_formed_from_merged_metrics() -> None:
    batch, outputs = make(3)
    loss = Loss({"value": maths.Value()})
    _, m = evaluate(loss, batch, outputs, denominator(loss, batch))
    assert outputs.values is not None
    targets, values = batch.token_keys["returns"][batch.mask], outputs.values.detach()[batch.mask]
    expected = 1 - (targets - values).square().mean() / targets.var(unbiased=False)
    found = 1 - m["value_error"].value / (m["return_square"].value - m["return_mean"].value ** 2)
    assert found == pytest.approx(float(expected))


def test_float32_stays_close_to_float64() -> None:
    batch, outputs = make(4, requires_grad=False)
    loss = Loss({"policy": TERMS["decoupled"], "kl": TERMS["kl_k3"]})
    exact, _ = evaluate(loss, batch, outputs, denominator(loss, batch))
    low = Packed(**{**vars(batch), "token_keys": {n: v.float() for n, v in batch.token_keys.items()}})
    outs = Outputs(**{name: getattr(outputs, name).float() for name in OUTPUTS})
    rough, _ = evaluate(loss, low, outs, denominator(loss, low))
    assert float(rough) == pytest.approx(float(exact), rel=1e-5)


def test_needs_follow_from_the_terms() -> None:
    assert needs(Loss({"a": maths.PolicyGradient()})) == LossNeeds(logprobs=True)
    assert needs(Loss({"a": maths.PolicyGradient(off_policy=maths.Decoupled())})) == LossNeeds(
        logprobs=True, proximal=True
    )
    assert needs(Loss({"a": maths.PolicyGradient(), "b": maths.Entropy()})) == LossNeeds(logprobs=True, entropy=True)
    assert needs(Loss({"a": maths.Value()})) == LossNeeds(values=True)
    assert needs(Loss({"a": maths.PairwiseScore()})) == LossNeeds(scores=True)
    assert needs(Loss({"a": maths.ApplyTerm("x:y", ("values", "reward"))})) == LossNeeds(values=True)
    assert needs(Loss({"a": maths.ApplyTerm("x:y")})) == LossNeeds(logprobs=True)


def stated(term: Term, batch: Packed, outputs: Outputs, without: str = "") -> tuple[Packed, Outputs]:
    """The keys and outputs that a term says it reads, and nothing else. without: a key or an output left out."""
    keys = {read.key for read in term.key_reads} | ({"proximal_logprobs"} if term.needs_proximal else set())
    given = replace(
        batch,
        token_keys={key: values for key, values in batch.token_keys.items() if key in keys - {without}},
        sample_keys={key: values for key, values in batch.sample_keys.items() if key in keys - {without}},
    )
    return given, Outputs(**{name: getattr(outputs, name) for name in term.outputs if name != without})


@pytest.mark.parametrize("name", [*TERMS, *PAIR_TERMS])
def test_a_term_reads_what_it_states_and_nothing_else(name: str) -> None:
    batch, outputs = make(3)
    term = (TERMS | PAIR_TERMS)[name]
    loss = Loss({name: term}, maths.PairMean() if term.of_pairs else maths.TokenMean())
    whole = denominator(loss, batch)
    expected, _ = evaluate(loss, batch, outputs, whole, FUNCTIONS)
    value, _ = evaluate(loss, *stated(term, batch, outputs), whole, FUNCTIONS)
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    # what the entry implies (behaviour log-probabilities, versions) not every variant looks up
    for missing in (*term.outputs, *(read.key for read in term.key_reads if read.field)):
        with pytest.raises(ValueError, match=missing):
            evaluate(loss, *stated(term, batch, outputs, missing), whole, FUNCTIONS)


@pytest.mark.parametrize("name", [name for name, term in TERMS.items() if term.idle_where_zero])
def test_a_term_has_no_gradient_where_it_says_that_it_is_idle(name: str) -> None:
    batch, outputs = make(4)
    term = TERMS[name]
    key = term.idle_where_zero
    assert key is not None
    silent = replace(batch, token_keys={**batch.token_keys, key: torch.zeros_like(batch.key(key))})
    loss = Loss({name: term})
    assert all(
        bool((g == 0).all()) for g in grads(evaluate(loss, silent, outputs, denominator(loss, batch))[0], outputs)
    )
    assert any(
        bool((g != 0).any()) for g in grads(evaluate(loss, batch, outputs, denominator(loss, batch))[0], outputs)
    )


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (Loss({"kl": maths.KL("gone")}), "needs the key 'gone'"),
        (Loss({"p": maths.Preference()}), "aggregate by pair_mean"),
        (Loss({"p": maths.CrossEntropy()}, maths.PairMean()), "pair_mean has no use"),
        (Loss({"c": maths.CrossEntropy(key="gone")}), "the key 'gone', a weight per sample"),
        (Loss({"mine": maths.ApplyTerm("a:b")}), "'a:b' was not loaded"),
        (Loss({"mine": maths.ApplyTerm("c:d")}), "a loss per token is needed"),
    ],
)
def test_what_is_missing_is_named(loss: Loss, text: str) -> None:
    batch, outputs = make(0)
    with pytest.raises(ValueError, match=text):
        evaluate(loss, batch, outputs, denominator(loss, batch), {"c:d": lambda batch, outputs: outputs.logprobs[:2]})


def test_missing_outputs_and_broken_pairs_are_named() -> None:
    batch, outputs = make(0)
    loss = Loss({"entropy": maths.Entropy(0.1)})
    with pytest.raises(ValueError, match="output 'entropy'"):
        evaluate(loss, batch, Outputs(logprobs=outputs.logprobs), denominator(loss, batch))
    with pytest.raises(ValueError, match="group 2 has 1 samples"):
        denominator(Loss({"p": maths.Preference()}, maths.PairMean()), batch.select([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("seed", range(20))
def test_segment_and_suffix_sums_are_loops(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 12) for _ in range(rng.randint(0, 6))]
    values = torch.randn(sum(lengths), dtype=DTYPE, generator=torch.Generator().manual_seed(seed))
    pieces = [piece.tolist() for piece in torch.split(values, lengths)] if lengths else []
    found = segment_sum(values, torch.tensor(lengths, dtype=torch.int64)).tolist()
    assert found == pytest.approx([sum(piece) for piece in pieces])
    decay, expected = rng.random(), []
    for piece in pieces:
        sums = [0.0]
        for value in reversed(piece):
            sums.append(value + decay * sums[-1])
        expected += sums[:0:-1]
    remaining = torch.tensor([n - 1 - i for n in lengths for i in range(n)], dtype=torch.int64)
    assert suffix_sums(values, remaining, decay).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
