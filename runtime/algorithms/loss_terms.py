"""The terms of a loss, each a pure function of a packed batch and a forward pass. Knows no aggregation and no engine.

A term returns its loss per token [T] (per pair [P] for `preference` and `pairwise_score`) and its statistics: for each
name a total and a weight over the masked tokens, which add over micro-batches and ranks, or the `Largest` of them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.maths import (
    KL,
    Clip,
    CrossEntropy,
    Decoupled,
    Distill,
    Entropy,
    Ignore,
    LoadBalance,
    Masked,
    NoClip,
    OffPolicy,
    PolicyGradient,
    Preference,
    StopGradient,
    Truncated,
    TwoSided,
    Value,
)
from realgraph.runtime.algorithms.estimators import indices_by_group, kl, segment_sum
from realgraph.runtime.batch import Outputs, Packed

PROXIMAL_LOGPROBS = "proximal_logprobs"


@dataclass(frozen=True)
class Largest:
    """A statistic that is a maximum: a scalar."""

    value: Tensor


Stats = dict[str, tuple[Tensor, Tensor] | Largest]  # name -> (total, weight), or a maximum


@dataclass(frozen=True)
class View:
    """A batch of N samples and T tokens beside the outputs of its forward pass, with what the terms ask of both."""

    batch: Packed
    outputs: Outputs

    @property
    def mask(self) -> Tensor:
        return self.batch.mask

    @cached_property
    def lengths(self) -> Tensor:
        """[N] int64."""
        return torch.tensor(self.batch.lengths, dtype=torch.int64, device=self.mask.device)

    @cached_property
    def index(self) -> Tensor:
        """[T] int64: the sample of each token."""
        return self.batch.sample_index()

    @cached_property
    def counts(self) -> Tensor:
        """[N] float64: masked tokens of each sample."""
        return segment_sum(self.mask.double(), self.lengths)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """[P] and [P] int64: positions of the preferred and of the other sample of each group. Raises ValueError."""
        first, second = [], []
        for group, members in indices_by_group(self.batch.groups).items():
            if len(members) != 2:
                raise ValueError(f"group {group} has {len(members)} samples here: a pair loss takes whole pairs of two")
            ids = self.batch.samples or range(self.batch.n_samples)
            preferred, other = sorted(members, key=lambda position: ids[position])
            first.append(preferred)
            second.append(other)
        device = self.mask.device
        return torch.tensor(first, dtype=torch.int64, device=device), torch.tensor(
            second, dtype=torch.int64, device=device
        )

    def key(self, name: str) -> Tensor:
        """A key of the batch at token level [T]. Raises ValueError naming it where the batch lacks it."""
        if name not in self.batch.token_keys and name not in self.batch.sample_keys:
            known = ", ".join(sorted([*self.batch.token_keys, *self.batch.sample_keys])) or "none"
            raise ValueError(f"the loss needs the key {name!r}; the batch has: {known}")
        return self.batch.key(name)

    def sampled(self, values: Tensor) -> Tensor:
        """[T] with exact zeros where the mask is false, in the gradient too."""
        return torch.where(self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device))

    def sample_sums(self, values: Tensor) -> Tensor:
        """[T] -> [N]: sums over each sample's masked tokens."""
        return segment_sum(self.sampled(values), self.lengths)

    def sample_means(self, values: Tensor) -> Tensor:
        """[T] -> [N]: means over each sample's masked tokens, 0 where it has none."""
        return self.sample_sums(values) / self.counts.clamp(min=1).to(values.dtype)

    def output(self, name: str) -> Tensor:
        """An output of the forward pass. Raises ValueError where it is missing or has another shape than the batch."""
        value: Tensor | None = getattr(self.outputs, name)
        expected = self.batch.n_samples if name == "scores" else self.batch.n_tokens
        if value is None:
            raise ValueError(f"the loss needs the output {name!r}, which the forward pass did not give")
        if value.shape != (expected,):
            raise ValueError(f"output {name!r} has the shape {tuple(value.shape)}, the batch needs ({expected},)")
        return value

    def mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> total and weight over the masked tokens, float64, detached."""
        return self.sampled(values.detach().double()).sum(), self.counts.sum()


def policy_gradient(term: PolicyGradient, view: View) -> tuple[Tensor, Stats]:
    """The negated surrogate objective of every masked token.

    r = policy / anchor per token, or the geometric mean over the sample (GSPO, arXiv:2507.18071, eq. 7). The anchor is
    the behaviour policy; under all other corrections it is the proximal policy, and the loss is weighted by
    proximal / behaviour (AReaL, arXiv:2505.24298, eq. 5), at the level of r. Where the batch has no proximal
    log-probabilities, the current ones are taken, detached: exact for the first optimizer step of a batch. Without a
    ratio the loss is -A log p (REINFORCE) and `clip` has no say. Returns [T].
    """
    logprobs, advantage = view.output("logprobs"), view.key(term.advantage)
    log_ratio, log_weight = _log_ratios(term, view, logprobs)
    if log_ratio is None:
        losses, stats = -advantage * logprobs, Stats()
    else:
        losses, clipped = surrogate(term.clip, log_ratio, advantage, logprobs)
        stats = _ratio_stats(view, log_ratio, clipped)
    if log_weight is not None:
        weight, exceeded = importance_weight(term.off_policy, log_weight, view)
        losses = weight * losses
        stats |= {"importance_weight": view.mean(weight), "masked_share": view.mean(exceeded)}
        stats |= _behaviour_stats(view, log_weight)
    return losses, stats | {"advantage": view.mean(advantage)}


def _log_ratios(term: PolicyGradient, view: View, logprobs: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """[T] log(policy / anchor) and [T] log(proximal / behaviour), both 0 off the mask; None for what has no part."""

    def level(difference: Tensor) -> Tensor:
        return view.sample_means(difference)[view.index] if term.ratio == "sequence" else view.sampled(difference)

    if isinstance(term.off_policy, Ignore):
        return (None if term.ratio == "none" else level(logprobs - view.key(BEHAVIOUR_LOGPROBS))), None
    has_proximal = PROXIMAL_LOGPROBS in view.batch.token_keys
    proximal = view.key(PROXIMAL_LOGPROBS) if has_proximal else logprobs.detach()
    log_ratio = None if term.ratio == "none" else level(logprobs - proximal)
    return log_ratio, level(proximal - view.key(BEHAVIOUR_LOGPROBS))


def surrogate(clip: Clip, log_ratio: Tensor, advantage: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """[T] loss of each token and [T] bool: where the clip cut it. All inputs [T]; `log_ratio` carries the gradient.

    Sources: arXiv:1707.06347, eq. 7 (two_sided); arXiv:1912.09729, eq. 5 (dual, `dual` > 1 bounds the loss of negative
    advantages at -dual x A); arXiv:2506.13585, eq. 4 (stop_gradient: gradient through log p only).
    """
    ratio = log_ratio.exp()
    match clip:
        case NoClip():
            return -ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool)
        case StopGradient(low=low, high=high):
            bounded = ratio.detach().clamp(1 - low, 1 + high)
            return -bounded * advantage * logprobs, bounded != ratio
        case TwoSided(low=low, high=high, dual=dual):
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            clipped = torch.where(advantage > 0, ratio > 1 + high, (ratio < 1 - low) & (advantage < 0))
            if dual is not None:
                clipped = clipped | ((advantage < 0) & (ratio > dual))
                gain = torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)
            return -gain, clipped


def importance_weight(off_policy: OffPolicy, log_weight: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """[T] constant weight and [T] bool: where proximal / behaviour is beyond its bounds. `log_weight`: [T].

    Beyond the cap `truncated` and `clamp` give the cap. `mask` and `masked` give 0: that token has no part in the loss,
    and under `level: sequence` no token of its sample has.
    """
    weight = log_weight.detach().exp()
    match off_policy:
        case Ignore():
            return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)
        case Truncated(cap=cap) | Decoupled(cap=cap, exceed="clamp"):
            return weight.clamp(max=cap), weight > cap
        case Decoupled(cap=cap):
            return torch.where(weight > cap, torch.zeros_like(weight), weight), weight > cap
        case Masked(low=low, high=high, level=level):
            mean = view.sample_means(log_weight.detach())[view.index]
            ratio = mean.exp() if level == "sequence" else weight
            beyond = (ratio < low) | (ratio > high)
            return torch.where(beyond, torch.zeros_like(weight), weight), beyond


def _ratio_stats(view: View, log_ratio: Tensor, clipped: Tensor) -> Stats:
    """clip_fraction; ratio; ratio_max, the largest ratio; approx_kl, k3 of KL(anchor || policy)."""
    log_ratio = view.sampled(log_ratio.detach().double())
    ratio = log_ratio.exp()
    stats: Stats = {
        "clip_fraction": view.mean(clipped),
        "ratio": view.mean(ratio),
        "approx_kl": view.mean(kl(torch.zeros_like(log_ratio), log_ratio, "k3")),
    }
    if len(ratio):
        stats["ratio_max"] = Largest(torch.where(view.mask, ratio, 0.0).max())
    return stats


def _behaviour_stats(view: View, log_weight: Tensor) -> Stats:
    """behaviour_kl, k3 of KL(behaviour || proximal); behaviour_ratio, proximal / behaviour before any cap, and its
    square: of n tokens ratio^2 / square x n are worth as much as tokens of the proximal policy itself (Kish 1965)."""
    log_weight = view.sampled(log_weight.detach().double())
    ratio = log_weight.exp()
    return {
        "behaviour_kl": view.mean(kl(torch.zeros_like(log_weight), log_weight, "k3")),
        "behaviour_ratio": view.mean(ratio),
        "behaviour_ratio_square": view.mean(ratio.square()),
    }


def kl_penalty(term: KL, view: View) -> tuple[Tensor, Stats]:
    """coef x the estimated KL(policy || `to`) of every masked token, with gradient; [T]. See `estimators.kl`."""
    logprobs, other = view.output("logprobs"), view.key(term.to)
    # Off the mask either side may hold anything, and an overflow there would turn the gradient into NaN.
    divergence = kl(view.sampled(logprobs), view.sampled(other), term.estimator)
    return term.coef * divergence, {"kl": view.mean(divergence)}


def entropy(term: Entropy, view: View) -> tuple[Tensor, Stats]:
    """-coef x the entropy (nats) of the policy's distribution of every masked token; [T]."""
    values = view.output("entropy")
    return -term.coef * values, {"entropy": view.mean(values)}


def value(term: Value, view: View) -> tuple[Tensor, Stats]:
    """coef x half the squared error of the critic, the worse of plain and clipped around the old values; [T].

    Source: PPO2 of OpenAI baselines, `ppo2/model.py`; Huang et al. 2022, "The 37 implementation details of PPO", no. 9.
    """
    values, returns = view.output("values"), view.key(term.returns)
    error = (values - returns).square()
    worst = error
    stats: Stats = {}
    if term.clip is not None:
        old = view.key(term.old)
        near = torch.maximum(torch.minimum(values, old + term.clip), old - term.clip)
        worst = torch.maximum(error, (near - returns).square())
        stats["value_clip_fraction"] = view.mean(worst > error)
    stats |= {
        "value_mean": view.mean(values),
        "value_error": view.mean(error),
        "return_mean": view.mean(returns),
        "return_square": view.mean(returns.double().square()),
    }
    return term.coef * worst / 2, stats


def cross_entropy(term: CrossEntropy, view: View) -> tuple[Tensor, Stats]:
    """weight x -log p of every masked token, times the sample's own weight where `key` names one; [T].

    The statistic `nll` is the mean over masked tokens by the samples' weights.
    """
    logprobs = view.output("logprobs")
    if term.key is None:
        return -term.weight * logprobs, {"nll": view.mean(-logprobs)}
    weight = view.key(term.key).to(logprobs.dtype)
    total, _ = view.mean(-weight * logprobs)
    # Where a sample weighs nothing its log-probabilities have no part at all, not even as 0 x inf.
    losses = torch.where(weight != 0, -term.weight * weight * logprobs, torch.zeros_like(logprobs))
    return losses, {"nll": (total, view.mean(weight)[0])}


def distill(term: Distill, view: View) -> tuple[Tensor, Stats]:
    """A divergence between policy and teacher from tokens that the policy sampled; [T].

    What counts is the gradient: in the mean over the policy's samples that of `reverse` is the gradient of
    KL(policy || teacher) (as a loss, k2), and that of `forward` the gradient of KL(teacher || policy) (k3).
    The statistic `teacher_kl` estimates KL(policy || teacher) for both. Source: Tang & Munos 2025, arXiv:2506.09477;
    on-policy distillation: Agarwal et al. 2023, arXiv:2306.13649.
    """
    logprobs, teacher = view.sampled(view.output("logprobs")), view.sampled(view.key(term.teacher))
    losses = kl(logprobs, teacher, "k2" if term.direction == "reverse" else "k3")
    return losses, {"teacher_kl": view.mean(kl(logprobs, teacher, "k3"))}


def preference(term: Preference, view: View) -> tuple[Tensor, Stats]:
    """DPO: -log sigmoid(beta x (preferred's log-ratio to the reference - the other's)); [P] losses, one per pair.

    A sample's log-ratio is summed over its masked tokens. Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    log_ratio = view.sample_sums(view.output("logprobs") - view.key(term.ref))
    first, second = view.pairs
    margin = term.beta * (log_ratio[first] - log_ratio[second])
    stats = _pair_stats(margin)
    stats["chosen_reward"] = _mean_over(term.beta * log_ratio[first])
    stats["rejected_reward"] = _mean_over(term.beta * log_ratio[second])
    return -functional.logsigmoid(margin), stats


def pairwise_score(view: View) -> tuple[Tensor, Stats]:
    """Bradley-Terry: -log sigmoid(score of the preferred - score of the other); [P]. arXiv:2203.02155, eq. 1."""
    scores = view.output("scores")
    first, second = view.pairs
    margin = scores[first] - scores[second]
    return -functional.logsigmoid(margin), _pair_stats(margin) | {"score": _mean_over(scores)}


def _pair_stats(margin: Tensor) -> Stats:
    return {"accuracy": _mean_over(margin > 0), "margin": _mean_over(margin)}


def _mean_over(values: Tensor) -> tuple[Tensor, Tensor]:
    """Total and weight over all entries, float64, detached."""
    values = values.detach().double()
    return values.sum(), values.new_tensor(float(len(values)))


def load_balance(term: LoadBalance, view: View) -> tuple[Tensor, Stats]:
    """coef x the balance of this batch's forward pass, at every token alike. Raises ValueError without one."""
    balance = view.outputs.balance
    if balance is None:
        raise ValueError("a load_balance term takes a mixture of experts, and the model has none")
    losses = (term.coef * balance).expand(view.batch.n_tokens)
    return losses, {"load_balance": view.mean(balance.expand(view.batch.n_tokens))}
