"""From rewards to advantages: a pipeline of steps over the whole batch of a training step. Knows no model.

The running quantity starts as one reward a sample [N] (or a token [T], where the reward key has that level); a KL
penalty, GAE, a return or a baseline per token turns it into one number a token. Computed in float64, given as float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from realgraph.graphs.applied import step_keys
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS
from realgraph.graphs.spec import Advantage
from realgraph.graphs.steps import GAE, AdaptiveKL, ApplyStep, Center, KLPenalty, Overlong, Return, Scale, Step
from realgraph.runtime.algorithms.applied import AppliedCall, apply_step
from realgraph.runtime.algorithms.estimators import indices_by_group, kl, segment_sum, suffix_sums
from realgraph.runtime.batch import Packed
from realgraph.runtime.wire.metrics import Mean

StepFunction = Callable[..., Tensor]  # (batch: Packed, running: [N] or [T], **args) -> [N] or [T]
RETURNS = "returns"
KL_COEF = "kl_coef"


@dataclass
class AdvantagePipeline:
    """The running quantity of one batch, [N] or [T] float64 (zero off the mask), and what the steps leave beside it."""

    batch: Packed
    running: Tensor
    functions: Mapping[str, StepFunction]
    state: dict[str, float]
    per_token: bool = False  # the level of `running`
    returns: Tensor | None = None
    metrics: dict[str, Mean] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor(self.batch.lengths, dtype=torch.int64, device=self.batch.mask.device)

    @cached_property
    def counts(self) -> Tensor:
        """[N] float64: sampled tokens of each sample."""
        return segment_sum(self.batch.mask.double(), self.lengths)

    @cached_property
    def index(self) -> Tensor:
        """[T] int64: the sample of each token."""
        return self.batch.sample_index()

    @cached_property
    def group_index(self) -> Tensor:
        """[N] int64: 0, 1, ... for the prompt group of each sample."""
        groups = indices_by_group(self.batch.groups or range(self.batch.n_samples))
        numbers = torch.empty(self.batch.n_samples, dtype=torch.int64)
        for number, members in enumerate(groups.values()):
            numbers[members] = number
        return numbers.to(self.batch.mask.device)

    @cached_property
    def sampled(self) -> Tensor:
        """[M] int64: positions of the sampled tokens."""
        return self.batch.mask.nonzero().squeeze(1)

    @cached_property
    def remaining(self) -> Tensor:
        """[M] int64: sampled tokens of the same sample after each sampled token."""
        ends = self.counts.long().cumsum(0)
        return ends[self.index[self.sampled]] - 1 - torch.arange(len(self.sampled), device=ends.device)

    def key(self, name: str) -> Tensor:
        """A key of the batch as float64 at its own level. Raises ValueError naming it where the batch lacks it."""
        for keys in (self.batch.token_keys, self.batch.sample_keys):
            if name in keys:
                return keys[name].double()
        raise ValueError(f"the advantage needs the key {name!r}, which the batch lacks")

    def become_tokens(self, values: Tensor) -> None:
        """Take [T] as the running quantity, zero off the mask."""
        self.running = torch.where(self.batch.mask, values, 0.0)
        self.per_token = True

    def token_rewards(self) -> Tensor:
        """[T]: the running rewards per token; a sample's reward falls on its last sampled token."""
        if self.per_token:
            return self.running
        rewards = torch.zeros(self.batch.n_tokens, dtype=torch.float64, device=self.running.device)
        last = self.sampled[self.remaining == 0]
        rewards[last] = self.running[self.index[last]]
        return rewards

    def spread(self) -> Tensor:
        """[T]: the running quantity on every sampled token, a sample's one repeated."""
        values = self.running if self.per_token else self.running[self.index]
        return torch.where(self.batch.mask, values, 0.0)


def compute(
    call: Advantage, batch: Packed, state: Mapping[str, float], functions: Mapping[str, StepFunction] | None = None
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Mean]]:
    """Run the steps of `call` in order over the batch of a training step (its groups whole).

    The first key `call` reads is the reward; the first it writes gets the advantages [T] float32, zero off the mask;
    where a step makes returns, `returns` (or the second key it writes) is [T] float32 too. `state` holds the carried
    numbers (`kl_coef` of an adaptive KL penalty); what it is for the next step is returned beside the metrics.
    `functions`: the callable of each `apply` step's `fn`. Raises ValueError naming the sample of a reward that is not
    finite, and for keys that are missing.
    """
    work = _start(call, batch, functions or {}, dict(state))
    for name, step in call.steps.items():
        if step is not None:
            _step(work, call, name, step)
    advantages = work.spread()
    if not bool(advantages.isfinite().all()):
        worst = int((~advantages.isfinite()).nonzero()[0, 0])
        raise ValueError(f"the advantage of {_sample(batch, int(work.index[worst]))} is not finite")
    count = float(work.counts.sum())
    work.metrics["advantage"] = Mean(float(advantages.sum()), count)
    work.metrics["advantage_abs"] = Mean(float(advantages.abs().sum()), count)
    outputs = {call.writes[0]: advantages.float()}
    if work.returns is not None:
        outputs[call.writes[1] if len(call.writes) > 1 else RETURNS] = work.returns.float()
        work.metrics["return"] = Mean(float(work.returns.sum()), count)
    return outputs, work.state, work.metrics


def _start(
    call: Advantage, batch: Packed, functions: Mapping[str, StepFunction], state: dict[str, float]
) -> AdvantagePipeline:
    """The reward as the first running quantity, checked and measured."""
    work = AdvantagePipeline(batch, torch.zeros(batch.n_samples, dtype=torch.float64), functions, state)
    name = call.reads[0] if call.reads else "reward"
    rewards = work.key(name)
    per_token = name in batch.token_keys
    if per_token:
        work.become_tokens(rewards)
        totals = segment_sum(work.running, work.lengths)
    else:
        work.running = totals = rewards
    if not bool(totals.isfinite().all()):
        worst = int((~totals.isfinite()).nonzero()[0, 0])
        raise ValueError(f"the {name} of {_sample(batch, worst)} is {float(totals[worst])}, not a finite number")
    n = batch.n_samples
    work.metrics["reward"] = Mean(float(totals.sum()), n)
    work.metrics["reward_square"] = Mean(float(totals.square().sum()), n)
    if batch.groups and n:
        mean, _ = _moments(totals, work.group_index)
        spread = _by(work.group_index, (totals - mean[work.group_index]).abs())
        work.metrics["equal_groups"] = Mean(float((spread < 1e-12).sum()), len(spread))
    return work


def _sample(batch: Packed, position: int) -> str:
    return f"sample {batch.samples[position] if batch.samples else position}"


def _step(work: AdvantagePipeline, call: Advantage, name: str, step: Step) -> None:
    match step:
        case KLPenalty():
            _kl_penalty(work, name, step)
        case Overlong():
            _overlong(work, step)
        case Center():
            _center(work, step)
        case Scale():
            _scale(work, step)
        case GAE():
            _gae(work, step)
        case Return(gamma=gamma):
            work.become_tokens(_scatter(work, suffix_sums(work.token_rewards()[work.sampled], work.remaining, gamma)))
            work.returns = work.running
        case ApplyStep():
            _apply(work, name, step, step_keys(call, step))


def _kl_penalty(work: AdvantagePipeline, name: str, step: KLPenalty) -> None:
    """Reward per token: the score on the last sampled token, minus coef x KL(behaviour || `to`) on each sampled one.

    An adaptive coefficient follows its target by Ziegler et al. 2019 (arXiv:1909.08593), sec. 2.2: multiplied by
    1 + clip(KL / target - 1, -0.2, 0.2) x samples / horizon, KL in nats a sample.
    """
    mask = work.batch.mask
    estimates = torch.where(mask, kl(work.key(BEHAVIOUR_LOGPROBS), work.key(step.to), step.estimator), 0.0)
    n_samples = int((work.counts > 0).sum())
    per_sample = float(estimates.sum()) / max(n_samples, 1)
    work.metrics["kl"] = Mean(float(estimates.sum()), float(work.counts.sum()))
    work.metrics["kl_per_sample"] = Mean(float(estimates.sum()), n_samples)
    if isinstance(step.coef, AdaptiveKL):
        slot = KL_COEF if KL_COEF not in work.metrics else f"{name}.{KL_COEF}"
        coef = work.state.get(slot, step.coef.init)
        error = min(max(per_sample / step.coef.target - 1, -0.2), 0.2)
        work.state[slot] = coef * (1 + error * n_samples / step.coef.horizon)
    else:
        slot, coef = KL_COEF, step.coef
    work.metrics[slot] = Mean(coef)
    work.become_tokens(work.token_rewards() - coef * estimates)


def _overlong(work: AdvantagePipeline, step: Overlong) -> None:
    """Add 0 up to `start` sampled tokens, -1 from `limit` on, linear between (arXiv:2503.14476, eq. 13)."""
    penalty = -((work.counts - step.start) / max(step.limit - step.start, 1)).clamp(0, 1)
    work.metrics["overlong"] = Mean(float((penalty < 0).sum()), work.batch.n_samples)
    if not work.per_token:
        work.running = work.running + penalty
        return
    last = work.sampled[work.remaining == 0]
    work.running = work.running.clone()
    work.running[last] += penalty[work.index[last]]


def _items(work: AdvantagePipeline, by: str) -> tuple[Tensor, Tensor]:
    """[K] values that a baseline or a scale is taken over, and [K] the set (group or whole batch) of each."""
    values = work.running[work.sampled] if work.per_token else work.running
    if by == "batch":
        return values, torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return values, work.group_index[work.index[work.sampled]] if work.per_token else work.group_index


def _by(sets: Tensor, values: Tensor) -> Tensor:
    """Sums of `values` [K] over each set [S]."""
    n_sets = int(sets.max()) + 1 if len(sets) else 0
    return values.new_zeros(n_sets).index_add(0, sets, values)


def _moments(values: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    """[S] mean and [S] standard deviation (n - 1; 0 for a single value) of each set."""
    count = _by(sets, torch.ones_like(values))
    mean = _by(sets, values) / count
    square = _by(sets, (values - mean[sets]).square())
    return mean, (square / (count - 1).clamp(min=1)).sqrt()


def _put(work: AdvantagePipeline, values: Tensor) -> None:
    """Take [K] values of `_items` back as the running quantity, at the same level."""
    work.running = _scatter(work, values) if work.per_token else values


def _scatter(work: AdvantagePipeline, values: Tensor) -> Tensor:
    """[M] of the sampled tokens -> [T], zero elsewhere."""
    whole = torch.zeros(work.batch.n_tokens, dtype=torch.float64, device=values.device)
    whole[work.sampled] = values
    return whole


def _center(work: AdvantagePipeline, step: Center) -> None:
    """Subtract a mean over samples, or over sampled tokens once the running quantity is per token; or subtract a key.

    leave_one_out: the mean of the group's other samples (of all their tokens), RLOO, arXiv:2402.14740, eq. 8.
    """
    if step.by == "key":
        _subtract_key(work, step)
        return
    values, sets = _items(work, step.by)
    if step.by != "leave_one_out":
        mean, _ = _moments(values, sets)
        _put(work, values - mean[sets])
        return
    owner = work.index[work.sampled] if work.per_token else torch.arange(len(values), device=values.device)
    ones = torch.ones_like(values)
    n = work.batch.n_samples
    own_sum, own_count = values.new_zeros(n).index_add(0, owner, values), values.new_zeros(n).index_add(0, owner, ones)
    others = _by(sets, ones)[sets] - own_count[owner]
    if bool((others == 0).any()):
        alone = _sample(work.batch, int(owner[(others == 0).nonzero()[0, 0]]))
        raise ValueError(f"{alone} has no other sample in its group: leave_one_out needs two")
    _put(work, values - (_by(sets, values)[sets] - own_sum[owner]) / others)


def _subtract_key(work: AdvantagePipeline, step: Center) -> None:
    assert step.key is not None, "the checker refuses `by: key` without a key"
    baseline = work.key(step.key)
    if step.key in work.batch.token_keys:
        work.become_tokens(work.spread() - baseline)
    elif work.per_token:
        work.become_tokens(work.running - baseline[work.index])
    else:
        work.running = work.running - baseline


def _scale(work: AdvantagePipeline, step: Scale) -> None:
    """Divide by standard deviation (n - 1) + eps of the running values as they stand; by 1 where that sum is 0."""
    values, sets = _items(work, step.by)
    _, deviation = _moments(values, sets)
    divisor = deviation + step.eps
    _put(work, values / torch.where(divisor > 0, divisor, 1.0)[sets])


def _gae(work: AdvantagePipeline, step: GAE) -> None:
    """A[t] = delta[t] + gamma lam A[t + 1], delta[t] = r[t] + gamma V[t + 1] - V[t], over sampled tokens.

    V[t] is the value of the state before token t; beyond the last sampled token it is 0. returns = A + V.
    explained_variance: 1 - variance of (returns - V) / variance of returns, over sampled tokens.
    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.
    """
    rewards, values = work.token_rewards()[work.sampled], work.key(step.values)[work.sampled]
    following = torch.cat([values[1:], values.new_zeros(min(len(values), 1))])
    following = torch.where(work.remaining > 0, following, 0.0)
    deltas = rewards + step.gamma * following - values
    advantages = suffix_sums(deltas, work.remaining, step.gamma * step.lam)
    work.returns = _scatter(work, advantages + values)
    variance = float((advantages + values).var(correction=0)) if len(values) else 0.0
    if variance > 0:
        work.metrics["explained_variance"] = Mean(1 - float(advantages.var(correction=0)) / variance)
    work.become_tokens(_scatter(work, advantages))


def _apply(work: AdvantagePipeline, name: str, step: ApplyStep, keys: tuple[str, ...]) -> None:
    """The user's function of the batch and the running quantity; the shape it returns says the new level."""
    if step.fn not in work.functions:
        raise ValueError(f"step {name!r}: the function {step.fn!r} was not loaded")
    call = AppliedCall(f"step {name!r}", step.fn, work.functions[step.fn], keys, step.args)
    result = apply_step(call, work.batch, work.running)
    if result.shape == work.running.shape and not work.per_token:
        work.running = result
    else:
        work.become_tokens(result)
