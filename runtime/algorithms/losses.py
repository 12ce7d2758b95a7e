"""A whole loss: what it needs of a forward pass, its denominator, and its value on one micro-batch. No engine, no rank.

    loss of an optimizer step = sum over micro-batches and ranks of numerator(part) / sum of denominator(part)

so each part divides its own numerator by the denominator of the whole, and the parts add up, empty ones too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from realgraph.graphs.maths import (
    KL,
    OUTPUTS,
    ApplyTerm,
    Constant,
    CrossEntropy,
    Distill,
    Entropy,
    LoadBalance,
    Loss,
    PairMean,
    PairwiseScore,
    PolicyGradient,
    Preference,
    SequenceMean,
    Term,
    TokenMean,
    Value,
)
from realgraph.runtime.algorithms import loss_terms
from realgraph.runtime.algorithms.applied import AppliedCall, apply_term
from realgraph.runtime.algorithms.loss_terms import Largest, Stats, View
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.wire.metrics import Max, Mean, Metric

LossFunction = Callable[..., Tensor]  # (batch: Packed, outputs: Outputs, **args) -> [T], a loss per token


@dataclass(frozen=True)
class LossNeeds:
    """The outputs of a forward pass that a loss needs."""

    logprobs: bool = False
    entropy: bool = False
    values: bool = False
    scores: bool = False
    balance: bool = False  # of the loads of experts
    proximal: bool = False  # log-probabilities from before the batch's first step


def needs(loss: Loss) -> LossNeeds:
    """The outputs that `loss` needs; an `apply` term gets log-probabilities unless it reads other outputs."""
    terms = loss.terms.values()
    outputs = {output for term in terms for output in term.outputs}
    return LossNeeds(
        **{name: name in outputs for name in OUTPUTS},
        balance=loss.balances_routes,
        proximal=any(term.needs_proximal for term in terms),
    )


def denominator(loss: Loss, batch: Packed) -> Tensor:
    """This batch's share of what the loss is divided by: a float64 scalar that adds over micro-batches and ranks.

    token_mean: masked tokens; sequence_mean: samples with a masked token; constant: samples x length; pair_mean: pairs.
    Where every term is a cross entropy with a weight per sample, samples that weigh nothing are not counted.
    """
    return _denominator(loss, View(batch, Outputs()))


def _denominator(loss: Loss, view: View) -> Tensor:
    counted = _counted(loss, view.batch)
    match loss.aggregate:
        case TokenMean():
            return torch.where(counted, view.counts, 0.0).sum()
        case SequenceMean():
            return (counted & (view.counts > 0)).sum().double()
        case Constant(length=length):
            return counted.sum().double() * length
        case PairMean():
            return view.counts.new_tensor(float(len(view.pairs[0])))


def evaluate(
    loss: Loss,
    batch: Packed,
    outputs: Outputs,
    denominator: Tensor,
    functions: Mapping[str, LossFunction] | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """The batch's part of the loss, a float64 scalar with gradient, and its metrics, which merge by `protocol.merge`.

    `denominator`: that of the whole optimizer step, over micro-batches and ranks. `functions`: the callable of each
    `apply` term's `fn`. An empty batch or mask gives exactly 0, with a graph. Metrics: `loss`, `<term>_loss`, and each
    term's own (prefixed with the term's name where two terms are of one kind). Raises ValueError for keys or outputs
    that are missing, and for terms that do not fit the aggregation.
    """
    view = View(batch, outputs)
    kinds = [type(term) for term in loss.terms.values()]
    local = _denominator(loss, view)
    total = local.new_zeros(())
    stats: Stats = {}
    for name, term in loss.terms.items():
        losses, term_stats = _term(name, term, view, functions or {})
        part = _numerator(loss, name, losses, view)
        total = total + part
        prefix = f"{name}_" if kinds.count(type(term)) > 1 else ""
        stats |= {f"{name}_loss": (part.detach(), local), **{prefix + key: stat for key, stat in term_stats.items()}}
    stats["loss"] = (total.detach(), local)
    whole = denominator.to(total)
    return total / torch.where(whole > 0, whole, torch.ones_like(whole)), _metrics(stats)


def _term(name: str, term: Term, view: View, functions: Mapping[str, LossFunction]) -> tuple[Tensor, Stats]:
    """A term's losses, per token [T] or per pair [P], and its statistics."""
    match term:
        case PolicyGradient():
            return loss_terms.policy_gradient(term, view)
        case KL():
            return loss_terms.kl_penalty(term, view)
        case Entropy():
            return loss_terms.entropy(term, view)
        case Value():
            return loss_terms.value(term, view)
        case CrossEntropy():
            return loss_terms.cross_entropy(term, view)
        case Preference():
            return loss_terms.preference(term, view)
        case PairwiseScore():
            return loss_terms.pairwise_score(view)
        case Distill():
            return loss_terms.distill(term, view)
        case LoadBalance():
            return loss_terms.load_balance(term, view)
        case ApplyTerm(fn=fn):
            if fn not in functions:
                raise ValueError(f"term {name!r}: the function {fn!r} was not loaded")
            call = AppliedCall(f"term {name!r}", fn, functions[fn], term.keys, term.args)
            return apply_term(call, view.batch, view.outputs, term.outputs), {}


def _numerator(loss: Loss, name: str, losses: Tensor, view: View) -> Tensor:
    """float64 scalar: the sum that the aggregation divides."""
    of_pairs = loss.terms[name].of_pairs
    if of_pairs != isinstance(loss.aggregate, PairMean):
        kind = "is a loss of pairs: aggregate by pair_mean" if of_pairs else "is a loss of tokens: pair_mean has no use"
        raise ValueError(f"term {name!r} {kind}")
    match loss.aggregate:
        case TokenMean() | Constant():
            return view.sampled(losses).sum(dtype=torch.float64)
        case SequenceMean():
            return view.sample_means(losses.double()).sum()
        case PairMean():
            return losses.sum(dtype=torch.float64)


def _counted(loss: Loss, batch: Packed) -> Tensor:
    """[N] bool: samples that some term gives a weight other than 0."""
    keys = [term.sample_weight for term in loss.terms.values()]
    counted = torch.zeros(batch.n_samples, dtype=torch.bool, device=batch.mask.device)
    for key in keys:
        if key is None or key in batch.token_keys:
            return torch.ones_like(counted)
        if key not in batch.sample_keys:
            raise ValueError(f"the loss needs the key {key!r}, a weight per sample; the batch lacks it")
        counted = counted | (batch.sample_keys[key] != 0)
    return counted


def _metrics(stats: Stats) -> dict[str, Metric]:
    """One transfer from the device for all of them."""
    if not stats:
        return {}
    parts = [(stat.value,) if isinstance(stat, Largest) else stat for stat in stats.values()]
    flat = iter(torch.stack([part.double() for pair in parts for part in pair]).tolist())
    return {
        name: Max(next(flat)) if isinstance(stat, Largest) else Mean(next(flat), next(flat))
        for name, stat in stats.items()
    }
