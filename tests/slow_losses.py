"""Losses written as loops, one token at a time, from the papers; and random batches to try them on."""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from realgraph.graphs import maths
from realgraph.graphs.maths import OUTPUTS, Aggregate, Loss, Term
from realgraph.runtime.algorithms.losses import LossFunction
from realgraph.runtime.batch import Outputs, Packed

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
    "masked": maths.PolicyGradient(off_policy=maths.Masked(0.8, 1.3)),
    "masked_samples": maths.PolicyGradient(off_policy=maths.Masked(0.95, 1.05, "sequence")),
    "gspo_masked": maths.PolicyGradient(ratio="sequence", off_policy=maths.Masked(0.95, 1.05)),
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


def slow_kl(p: float, q: float, kind: str) -> float:
    r = math.exp(q - p)
    return {"k1": p - q, "k2": 0.5 * (p - q) ** 2, "k3": r - 1 - math.log(r), "abs": abs(p - q)}[kind]


def slow_policy(term: maths.PolicyGradient, at: Callable[[str, int], float], tokens: list[int], t: int) -> float:
    """-objective of token t of a sample whose masked tokens are `tokens`."""
    ignore = isinstance(term.off_policy, maths.Ignore)
    anchor = "behaviour_logprobs" if ignore else "proximal_logprobs"
    over = tokens if term.ratio == "sequence" else [t]

    def gap(a: str, b: str, over: list[int] = over) -> float:
        return math.exp(sum(at(a, u) - at(b, u) for u in over) / len(over))

    weight = 1.0 if ignore else gap("proximal_logprobs", "behaviour_logprobs")
    match term.off_policy:
        case maths.Truncated(cap=cap) | maths.Decoupled(cap=cap, exceed="clamp"):
            weight = min(weight, cap)
        case maths.Decoupled(cap=cap):
            weight = weight if weight <= cap else 0.0
        case maths.Masked(low=low, high=high, level=level):
            judged = gap("proximal_logprobs", "behaviour_logprobs", tokens) if level == "sequence" else weight
            weight = weight if low <= judged <= high else 0.0
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
