"""Losses against slow formulas written as loops, exact expectations, and splits of a batch."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from realgraph.graphs import maths
from realgraph.graphs.maths import Aggregate, Loss, Term
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.estimators import kl, segment_sum, suffix_sums
from realgraph.runtime.loss_terms import surrogate
from realgraph.runtime.losses import OUTPUTS, LossFunction, Needs, denominator, evaluate, needs
from realgraph.runtime.protocol import Mean

DTYPE = torch.float64


def masked_square(batch: Packed, outputs: Outputs, scale: float) -> Tensor:
    assert outputs.logprobs is not None
    return scale * outputs.logprobs.square() * batch.key("reward")


FUNCTIONS: dict[str, LossFunction] = {"mine:square": masked_square}

TERMS: dict[str, Term] = {
    "policy_gradient": maths.PolicyGradient(),
    "dual": maths.PolicyGradient(clip=maths.TwoSided(0.1, 0.1, dual=1.2)),
    "no_clip": maths.PolicyGradient(clip=maths.NoClip()),
    "cispo": maths.PolicyGradient(clip=maths.StopGradient(0.3, 0.2)),
    "reinforce": maths.PolicyGradient(ratio="none"),
    "gspo": maths.PolicyGradient(ratio="sequence", clip=maths.TwoSided(0.05, 0.1)),
    "truncated": maths.PolicyGradient(off_policy=maths.Truncated(1.2)),
    "decoupled": maths.PolicyGradient(off_policy=maths.Decoupled(1.3)),
    "decoupled_clamp": maths.PolicyGradient(off_policy=maths.Decoupled(1.3, "clamp")),
    "gspo_decoupled": maths.PolicyGradient(ratio="sequence", off_policy=maths.Decoupled(1.3)),
    "reinforce_truncated": maths.PolicyGradient(ratio="none", off_policy=maths.Truncated(1.2)),
    "kl_k1": maths.KL("ref_logprobs", "k1", 0.3),
    "kl_k2": maths.KL("ref_logprobs", "k2", 0.3),
    "kl_k3": maths.KL("ref_logprobs", "k3", 0.3),
    "kl_abs": maths.KL("ref_logprobs", "abs", 0.3),
    "entropy": maths.Entropy(0.01),
    "value": maths.Value(),
    "value_plain": maths.Value(clip=None, coef=0.5),
    "cross_entropy": maths.CrossEntropy(),
    "weighted": maths.CrossEntropy(2.0, "weight"),
    "distill": maths.Distill("ref_logprobs"),
    "distill_forward": maths.Distill("ref_logprobs", "forward"),
    "apply": maths.ApplyTerm("mine:square", ("logprobs", "reward"), {"scale": 0.7}),
}
PAIR_TERMS: dict[str, Term] = {"preference": maths.Preference(), "pairwise_score": maths.PairwiseScore()}
AGGREGATES: dict[str, Aggregate] = {
    "token_mean": maths.TokenMean(),
    "sequence_mean": maths.SequenceMean(),
    "constant": maths.Constant(17),
}


def make(seed: int, n: int = 6, per_group: int = 2, requires_grad: bool = True) -> tuple[Packed, Outputs]:
    """A random batch; sample 3 has an empty mask; off the mask every key holds infinities that must not matter."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(rng.randint(2, 9) for _ in range(n))
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.6
    starts = [sum(lengths[:i]) for i in range(n)]
    for i, start in enumerate(starts):
        mask[start] = False
        mask[start + 1] = True
        if i == 3:
            mask[start : start + lengths[i]] = False

    def draw(scale: float = 0.3, shift: float = -1.0) -> Tensor:
        return torch.randn(total, generator=generator, dtype=DTYPE) * scale + shift

    def poison(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.full_like(values, 1e30))

    logprobs = draw()
    outputs = Outputs(
        logprobs=logprobs.requires_grad_(requires_grad),
        entropy=draw(0.1, 2.0).requires_grad_(requires_grad),
        values=draw(1.0, 0.0).requires_grad_(requires_grad),
        scores=torch.randn(n, generator=generator, dtype=DTYPE).requires_grad_(requires_grad),
    )
    near = logprobs.detach()
    batch = Packed(
        tokens=torch.randint(0, 50, (total,), generator=generator),
        lengths=lengths,
        mask=mask,
        samples=tuple(range(100, 100 + n)),
        groups=tuple(i // per_group for i in range(n)),
        token_keys={
            "behaviour_logprobs": poison(near + draw(0.3, 0.0)),
            "proximal_logprobs": poison(near + draw(0.2, 0.0)),
            "ref_logprobs": poison(near + draw(0.5, 0.0)),
            "advantages": poison(draw(1.0, 0.0)),
            "returns": poison(draw(1.0, 0.0)),
            "values": poison(draw(1.0, 0.0)),
        },
        sample_keys={
            "weight": torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0, 0.0][:n]),
            "reward": torch.randn(n, generator=generator, dtype=DTYPE),
        },
    )
    return batch, outputs


def part(batch: Packed, outputs: Outputs, indices: list[int]) -> tuple[Packed, Outputs]:
    """Some samples of a batch with their slices of the outputs, in one graph with the whole."""
    pieces = torch.split(torch.arange(batch.n_tokens), list(batch.lengths))
    rows = torch.cat([pieces[i] for i in indices]) if indices else torch.zeros(0, dtype=torch.int64)
    of = {name: getattr(outputs, name)[rows] for name in ("logprobs", "entropy", "values")}
    assert outputs.scores is not None
    return batch.select(indices), Outputs(scores=outputs.scores[torch.tensor(indices, dtype=torch.int64)], **of)


def grads(scalar: Tensor, outputs: Outputs) -> list[Tensor]:
    inputs = [getattr(outputs, name) for name in OUTPUTS]
    found = torch.autograd.grad(scalar, inputs, allow_unused=True)
    return [torch.zeros_like(value) if g is None else g for g, value in zip(found, inputs, strict=True)]


# --- the slow oracle: one token at a time, from the papers ------------------------------------------------------------


def slow_kl(p: float, q: float, kind: str) -> float:
    r = math.exp(q - p)
    return {"k1": p - q, "k2": 0.5 * (p - q) ** 2, "k3": r - 1 - math.log(r), "abs": abs(p - q)}[kind]


def slow_policy(term: maths.PolicyGradient, at: Callable[[str, int], float], tokens: list[int], t: int) -> float:
    """-objective of token t of a sample whose masked tokens are `tokens`."""
    ignore = isinstance(term.off_policy, maths.Ignore)
    anchor = "behaviour_logprobs" if ignore else "proximal_logprobs"
    over = tokens if term.ratio == "sequence" else [t]

    def gap(a: str, b: str) -> float:
        return math.exp(sum(at(a, u) - at(b, u) for u in over) / len(over))

    weight = 1.0 if ignore else gap("proximal_logprobs", "behaviour_logprobs")
    match term.off_policy:
        case maths.Truncated(cap=cap) | maths.Decoupled(cap=cap, exceed="clamp"):
            weight = min(weight, cap)
        case maths.Decoupled(cap=cap):
            weight = weight if weight <= cap else 0.0
        case maths.Ignore():
            pass
    a, ratio = at("advantages", t), gap("logprobs", anchor)
    if term.ratio == "none":
        return -weight * a * at("logprobs", t)
    match term.clip:
        case maths.NoClip():
            gain = ratio * a
        case maths.StopGradient(low=low, high=high):
            gain = min(max(ratio, 1 - low), 1 + high) * a * at("logprobs", t)
        case maths.TwoSided(low=low, high=high, dual=dual):
            gain = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            if dual is not None and a < 0:
                gain = max(gain, dual * a)
        case other:
            raise AssertionError(other)
    return -weight * gain


def slow_term(term: Term, at: Callable[[str, int], float], tokens: list[int], t: int, weight: float) -> float:
    match term:
        case maths.PolicyGradient():
            return slow_policy(term, at, tokens, t)
        case maths.KL(to=to, estimator=estimator, coef=coef):
            return coef * slow_kl(at("logprobs", t), at(to, t), estimator)
        case maths.Entropy(coef=coef):
            return -coef * at("entropy", t)
        case maths.Value(clip=clip, coef=coef):
            v, old, target = at("new_values", t), at("values", t), at("returns", t)
            near = v if clip is None else old + min(max(v - old, -clip), clip)
            return coef * 0.5 * max((v - target) ** 2, (near - target) ** 2)
        case maths.CrossEntropy(weight=scale, key=key):
            return -scale * (weight if key else 1.0) * at("logprobs", t)
        case maths.Distill(teacher=teacher, direction=direction):
            return slow_kl(at("logprobs", t), at(teacher, t), "k2" if direction == "reverse" else "k3")
        case maths.ApplyTerm(args=args):
            return float(args["scale"]) * at("logprobs", t) ** 2 * at("reward", t)
    raise AssertionError(term)


def slow_loss(loss: Loss, batch: Packed, outputs: Outputs) -> float:
    index = batch.sample_index().tolist()
    columns: dict[str, list[float]] = {name: key.tolist() for name, key in batch.token_keys.items()}
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    assert outputs.values is not None
    columns |= {"logprobs": outputs.logprobs.tolist(), "entropy": outputs.entropy.tolist()}
    columns |= {"new_values": outputs.values.tolist(), "reward": batch.key("reward").tolist()}
    weights = batch.sample_keys["weight"].tolist()
    only_weighted = all(isinstance(t, maths.CrossEntropy) and t.key for t in loss.terms.values())
    sums, n_tokens, means, n_samples, n_all = 0.0, 0, 0.0, 0, 0
    for i in range(batch.n_samples):
        tokens = [t for t in range(batch.n_tokens) if index[t] == i and bool(batch.mask[t])]
        counts = not only_weighted or weights[i] != 0
        n_all += counts
        n_samples += bool(tokens) and counts
        n_tokens += len(tokens) * counts
        mine = sum(
            slow_term(term, lambda name, t: columns[name][t], tokens, t, weights[i])
            for term in loss.terms.values()
            for t in tokens
        )
        sums += mine
        means += mine / len(tokens) if tokens else 0.0
    match loss.aggregate:
        case maths.TokenMean():
            return sums / n_tokens
        case maths.SequenceMean():
            return means / n_samples
        case maths.Constant(length=length):
            return sums / (n_all * length)
    raise AssertionError(loss.aggregate)


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
        assert all(math.isfinite(mean.total) for mean in metrics.values())


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
    for key, mean in merged.items():
        if key != "ratio_max":
            added = Mean(0.0, 0.0)
            for _, metrics in results:
                added += metrics.get(key, Mean(0.0, 0.0))
            assert added.value == pytest.approx(mean.value, rel=1e-12, abs=1e-14), key


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
    assert needs(Loss({"a": maths.PolicyGradient()})) == Needs(logprobs=True)
    assert needs(Loss({"a": maths.PolicyGradient(off_policy=maths.Decoupled())})) == Needs(logprobs=True, proximal=True)
    assert needs(Loss({"a": maths.PolicyGradient(), "b": maths.Entropy()})) == Needs(logprobs=True, entropy=True)
    assert needs(Loss({"a": maths.Value()})) == Needs(values=True)
    assert needs(Loss({"a": maths.PairwiseScore()})) == Needs(scores=True)
    assert needs(Loss({"a": maths.ApplyTerm("x:y", ("values", "reward"))})) == Needs(values=True)
    assert needs(Loss({"a": maths.ApplyTerm("x:y")})) == Needs(logprobs=True)


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
        evaluate(loss, batch, outputs, denominator(loss, batch), {"c:d": lambda batch, outputs: outputs.scores})


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
