"""The maths of an RL algorithm as data: steps of an advantage, terms and aggregation of a loss. Computes nothing.

Where a mapping entry leaves `kind` out, the entry's name is its kind: `steps: {center: {by: group}}`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Estimator = Literal["k1", "k2", "k3", "abs"]


class _Entry(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One entry of a pipeline: a tagged variant, written by the user."""


class AdaptiveKL(Struct, frozen=True, forbid_unknown_fields=True):
    """A KL coefficient that follows a target (Ziegler et al. 2019, sec. 2.2): it is carried from step to step."""

    init: Positive  # first coefficient
    target: Positive  # nats per sample
    horizon: Positive = 10_000.0  # samples


# --- advantage steps: each maps the running reward or advantage to the next -------------------------------------------


class KLPenalty(_Entry, frozen=True, tag="kl_penalty"):
    """Subtract coef x the estimated KL to the logprobs key `to` from every sampled token's reward."""

    to: str  # key of reference logprobs
    coef: NonNegative | AdaptiveKL = 0.05  # a number, or a mapping: adaptive
    estimator: Estimator = "k1"  # Schulman's k1, k2, k3, or |log ratio|


class Overlong(_Entry, frozen=True, tag="overlong"):
    """DAPO's soft penalty (arXiv:2503.14476, eq. 13): from `start` response tokens on, falling to -1 at `limit`."""

    start: Annotated[int, Meta(ge=0)]  # response tokens
    limit: Annotated[int, Meta(ge=1)]  # response tokens


class Center(_Entry, frozen=True, tag="center"):
    """Subtract a baseline: the mean of the group, of the group's other samples, of the batch, or a key."""

    by: Literal["group", "leave_one_out", "batch", "key"] = "group"  # which mean, or a key
    key: str | None = None  # with `by: key`: the baseline


class Scale(_Entry, frozen=True, tag="scale"):
    """Divide by the standard deviation of the group or the batch, plus eps."""

    by: Literal["group", "batch"] = "group"  # which standard deviation
    eps: NonNegative = 1e-6  # against division by zero


class GAE(_Entry, frozen=True, tag="gae"):
    """Generalised advantage estimation over tokens (arXiv:1506.02438, eq. 16); also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token
    lam: Fraction = 0.95  # bias against variance
    values: str = "values"  # key of the critic's values


class Return(_Entry, frozen=True, tag="return"):
    """Discounted reward-to-go of every token; also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token


class ApplyStep(_Entry, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, running, **args)`."""

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys it looks up beside those of its call
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are


Step = KLPenalty | Overlong | Center | Scale | GAE | Return | ApplyStep


# --- loss terms -------------------------------------------------------------------------------------------------------


class NoClip(_Entry, frozen=True, tag="none"):
    """The plain importance-weighted objective."""


class TwoSided(_Entry, frozen=True, tag="two_sided"):
    """PPO's clip to [1 - low, 1 + high] (arXiv:1707.06347, eq. 7); `dual` bounds negative terms (arXiv:1912.09729)."""

    low: NonNegative = 0.2  # below 1
    high: NonNegative = 0.2  # above 1
    dual: Annotated[float, Meta(gt=1)] | None = None  # null: no bound


class StopGradient(_Entry, frozen=True, tag="stop_gradient"):
    """CISPO (arXiv:2506.13585, eq. 4): the clipped ratio is a constant weight of the log-probability."""

    low: NonNegative = 1.0  # below 1
    high: NonNegative = 0.2  # above 1


Clip = NoClip | TwoSided | StopGradient


class Ignore(_Entry, frozen=True, tag="ignore"):
    """Take the behaviour policy as the proximal policy."""


class Truncated(_Entry, frozen=True, tag="truncated"):
    """Weight by the proximal / behaviour ratio, cut at `cap` (truncated importance sampling)."""

    cap: Positive = 2.0  # largest weight


class Decoupled(_Entry, frozen=True, tag="decoupled"):
    """Decoupled PPO (AReaL, arXiv:2505.24298, eq. 5): clip against the proximal policy, weigh by proximal/behaviour."""

    cap: Positive = 5.0  # largest weight
    exceed: Literal["mask", "clamp"] = "mask"  # tokens above the cap: left out, or weighed by it


OffPolicy = Ignore | Truncated | Decoupled


class PolicyGradient(_Entry, frozen=True, tag="policy_gradient"):
    """The clipped surrogate of a ratio per token, per sequence (GSPO, arXiv:2507.18071) or none (REINFORCE)."""

    advantage: str = "advantages"  # key
    ratio: Literal["token", "sequence", "none"] = "token"  # of what the probability ratio is taken
    clip: Clip = field(default_factory=TwoSided)  # of the ratio
    off_policy: OffPolicy = field(default_factory=Ignore)  # correction for older samples


class KL(_Entry, frozen=True, tag="kl"):
    """coef x the estimated KL(policy || `to`) of every sampled token, with gradient."""

    to: str  # key of reference logprobs
    estimator: Estimator = "k3"  # Schulman's k1, k2, k3, or |log ratio|
    coef: NonNegative = 0.0  # weight of the term


class Entropy(_Entry, frozen=True, tag="entropy"):
    """-coef x the entropy of the policy's distribution at every sampled token."""

    coef: float = 0.0  # weight of the bonus


class Value(_Entry, frozen=True, tag="value"):
    """Half the squared error of the critic, clipped around the old values (PPO2); `old` names them."""

    returns: str = "returns"  # key of the target
    clip: Positive | None = 0.2  # null: no clipping
    coef: NonNegative = 1.0  # weight of the term
    old: str = "values"  # key of the values before training


class CrossEntropy(_Entry, frozen=True, tag="cross_entropy"):
    """Negative log-likelihood of the masked tokens; `key` names a weight per sample."""

    weight: NonNegative = 1.0  # of the term
    key: str | None = None  # weight per sample


class Preference(_Entry, frozen=True, tag="preference"):
    """DPO (arXiv:2305.18290, eq. 7) over pairs: sample 0 of a group is preferred over sample 1."""

    beta: Positive = 0.1  # inverse temperature
    ref: str = "ref_logprobs"  # key of reference logprobs


class PairwiseScore(_Entry, frozen=True, tag="pairwise_score"):
    """Bradley-Terry loss of a reward model over pairs (arXiv:2203.02155, eq. 1)."""


class Distill(_Entry, frozen=True, tag="distill"):
    """Per-token divergence to a teacher's log-probabilities of the sampled tokens."""

    teacher: str  # key of the teacher's logprobs
    direction: Literal["forward", "reverse"] = "reverse"  # forward: KL(teacher || policy)


class ApplyTerm(_Entry, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, outputs, **args)`, a loss per token.

    It may look up the keys and the outputs (logprobs, entropy, values, scores) that `reads` names, and no others; where
    it names no output it gets logprobs.
    """

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys, and outputs of the trained role
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are
    over: Literal["sample", "group"] = "sample"  # group: each batch that it gets has its groups whole


Term = PolicyGradient | KL | Entropy | Value | CrossEntropy | Preference | PairwiseScore | Distill | ApplyTerm


class TokenMean(_Entry, frozen=True, tag="token_mean"):
    """Sum over masked tokens / their number in the whole batch of the optimizer step."""


class SequenceMean(_Entry, frozen=True, tag="sequence_mean"):
    """Mean over samples of each sample's mean over its masked tokens."""


class Constant(_Entry, frozen=True, tag="constant"):
    """Sum over masked tokens / (samples x length): Dr.GRPO (arXiv:2503.20783)."""

    length: Annotated[int, Meta(ge=1)]  # tokens


class PairMean(_Entry, frozen=True, tag="pair_mean"):
    """Mean over pairs of samples."""


def compares_groups(term: Term) -> bool:
    """Whether a term compares the samples of a group, so that a group may not be cut."""
    match term:
        case Preference() | PairwiseScore() | ApplyTerm(over="group"):
            return True
        case _:
            return False


Aggregate = TokenMean | SequenceMean | Constant | PairMean


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """A sum of terms under one aggregation; denominators are global over micro-batches and data-parallel ranks."""

    terms: dict[str, Term]  # added up
    aggregate: Aggregate = field(default_factory=TokenMean)  # from tokens to one number
