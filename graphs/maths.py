"""The maths of a loss as data: its terms and their aggregation. Computes nothing.

Where a mapping entry leaves `kind` out, the entry's name is its kind: `terms: {kl: {to: ref_logprobs}}`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.entries import Entry, Estimator, NonNegative, Positive


class NoClip(Entry, frozen=True, tag="none"):
    """The plain importance-weighted objective."""


class TwoSided(Entry, frozen=True, tag="two_sided"):
    """PPO's clip to [1 - low, 1 + high] (arXiv:1707.06347, eq. 7); `dual` bounds negative terms (arXiv:1912.09729)."""

    low: NonNegative = 0.2  # below 1
    high: NonNegative = 0.2  # above 1
    dual: Annotated[float, Meta(gt=1)] | None = None  # null: no bound


class StopGradient(Entry, frozen=True, tag="stop_gradient"):
    """CISPO (arXiv:2506.13585, eq. 4): the clipped ratio is a constant weight of the log-probability."""

    low: NonNegative = 1.0  # below 1
    high: NonNegative = 0.2  # above 1


Clip = NoClip | TwoSided | StopGradient


class Ignore(Entry, frozen=True, tag="ignore"):
    """Take the behaviour policy as the proximal policy."""


class Truncated(Entry, frozen=True, tag="truncated"):
    """Weight by the proximal / behaviour ratio, cut at `cap` (truncated importance sampling)."""

    cap: Positive = 2.0  # largest weight


class Decoupled(Entry, frozen=True, tag="decoupled"):
    """Decoupled PPO (AReaL, arXiv:2505.24298, eq. 5): clip against the proximal policy, weigh by proximal/behaviour."""

    cap: Positive = 5.0  # largest weight
    exceed: Literal["mask", "clamp"] = "mask"  # tokens above the cap: left out, or weighed by it


OffPolicy = Ignore | Truncated | Decoupled


class PolicyGradient(Entry, frozen=True, tag="policy_gradient"):
    """The clipped surrogate of a ratio per token, per sequence (GSPO, arXiv:2507.18071) or none (REINFORCE)."""

    advantage: str = "advantages"  # key
    ratio: Literal["token", "sequence", "none"] = "token"  # of what the probability ratio is taken
    clip: Clip = field(default_factory=TwoSided)  # of the ratio
    off_policy: OffPolicy = field(default_factory=Ignore)  # correction for older samples


class KL(Entry, frozen=True, tag="kl"):
    """coef x the estimated KL(policy || `to`) of every sampled token, with gradient."""

    to: str  # key of reference logprobs
    estimator: Estimator = "k3"  # Schulman's k1, k2, k3, or |log ratio|
    coef: NonNegative = 0.0  # weight of the term


class Entropy(Entry, frozen=True, tag="entropy"):
    """-coef x the entropy of the policy's distribution at every sampled token."""

    coef: float = 0.0  # weight of the bonus


class Value(Entry, frozen=True, tag="value"):
    """Half the squared error of the critic, clipped around the old values (PPO2); `old` names them."""

    returns: str = "returns"  # key of the target
    clip: Positive | None = 0.2  # null: no clipping
    coef: NonNegative = 1.0  # weight of the term
    old: str = "values"  # key of the values before training


class CrossEntropy(Entry, frozen=True, tag="cross_entropy"):
    """Negative log-likelihood of the masked tokens; `key` names a weight per sample."""

    weight: NonNegative = 1.0  # of the term
    key: str | None = None  # weight per sample


class Preference(Entry, frozen=True, tag="preference"):
    """DPO (arXiv:2305.18290, eq. 7) over pairs: sample 0 of a group is preferred over sample 1."""

    beta: Positive = 0.1  # inverse temperature
    ref: str = "ref_logprobs"  # key of reference logprobs


class PairwiseScore(Entry, frozen=True, tag="pairwise_score"):
    """Bradley-Terry loss of a reward model over pairs (arXiv:2203.02155, eq. 1)."""


class Distill(Entry, frozen=True, tag="distill"):
    """Per-token divergence to a teacher's log-probabilities of the sampled tokens."""

    teacher: str  # key of the teacher's logprobs
    direction: Literal["forward", "reverse"] = "reverse"  # forward: KL(teacher || policy)


class ApplyTerm(Entry, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, outputs, **args)`, a loss per token.

    It may look up the keys and the outputs (logprobs, entropy, values, scores) that `reads` names, and no others; where
    it names no output it gets logprobs.
    """

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys, and outputs of the trained role
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are
    over: Literal["sample", "group"] = "sample"  # group: each batch that it gets has its groups whole


Term = PolicyGradient | KL | Entropy | Value | CrossEntropy | Preference | PairwiseScore | Distill | ApplyTerm


class TokenMean(Entry, frozen=True, tag="token_mean"):
    """Sum over masked tokens / their number in the whole batch of the optimizer step."""


class SequenceMean(Entry, frozen=True, tag="sequence_mean"):
    """Mean over samples of each sample's mean over its masked tokens."""


class Constant(Entry, frozen=True, tag="constant"):
    """Sum over masked tokens / (samples x length): Dr.GRPO (arXiv:2503.20783)."""

    length: Annotated[int, Meta(ge=1)]  # tokens


class PairMean(Entry, frozen=True, tag="pair_mean"):
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
