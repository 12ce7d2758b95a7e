"""The maths of a loss as data: its terms and their aggregation. Computes nothing.

Where a mapping entry leaves `kind` out, the entry's name is its kind: `terms: {kl: {to: ref_logprobs}}`.

An entry states its facts (the keys that it reads, the outputs that it needs, whether it compares pairs, ...) beside its
fields, as class data or, where they follow from what the user wrote, as properties. The checker, the engines and the
losses read them there: a new entry needs its struct here and its function in `runtime/algorithms`, and no other edit.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.entries import Estimator, KeyRead, NonNegative, PipelineEntry, Positive, TaggedVariant
from realgraph.graphs.keys import (
    BEHAVIOUR_LOGPROBS,
    LOGPROBS_TYPE,
    TENSOR_TYPE,
    TOKEN_FLOAT_TYPE,
    VALUES_TYPE,
    VERSIONS,
    VERSIONS_TYPE,
    WEIGHT_TYPE,
)

Output = Literal["logprobs", "entropy", "values", "scores"]
OUTPUTS: tuple[Output, ...] = ("logprobs", "entropy", "values", "scores")  # of a forward pass
HEAD_OF_OUTPUT: dict[Output, str] = {"logprobs": "lm", "entropy": "lm", "values": "value", "scores": "score"}


class _LossTerm(PipelineEntry, frozen=True):
    """One term of a loss. Each also states `outputs`: what of a forward pass of the trained role it needs."""

    of_pairs: ClassVar[bool] = False  # a loss per pair of samples, not per token
    of_routes: ClassVar[bool] = False  # of the routes to experts, not of the head's outputs
    sees_idle: ClassVar[bool] = False  # it must get a batch whole, samples without a part in the loss included

    @property
    def needs_whole_groups(self) -> bool:
        """True where it compares the samples of a group, so that a group may not be cut."""
        return self.of_pairs

    @property
    def needs_proximal(self) -> bool:
        """True where it reads log-probabilities from before the batch's first optimizer step."""
        return False

    @property
    def idle_where_zero(self) -> str | None:
        """A key: where it is 0, the term and its gradient are exactly 0, whatever the model says."""
        return None

    @property
    def sample_weight(self) -> str | None:
        """A key by which samples weigh: the loss does not count those that weigh nothing."""
        return None


class NoClip(TaggedVariant, frozen=True, tag="none"):
    """The plain importance-weighted objective."""


class TwoSided(TaggedVariant, frozen=True, tag="two_sided"):
    """PPO's clip to [1 - low, 1 + high] (arXiv:1707.06347, eq. 7); `dual` bounds negative terms (arXiv:1912.09729)."""

    low: NonNegative = 0.2  # below 1
    high: NonNegative = 0.2  # above 1
    dual: Annotated[float, Meta(gt=1)] | None = None  # null: no bound


class StopGradient(TaggedVariant, frozen=True, tag="stop_gradient"):
    """CISPO (arXiv:2506.13585, eq. 4): the clipped ratio is a constant weight of the log-probability."""

    low: NonNegative = 1.0  # below 1
    high: NonNegative = 0.2  # above 1


Clip = NoClip | TwoSided | StopGradient


class Ignore(TaggedVariant, frozen=True, tag="ignore"):
    """Take the behaviour policy as the proximal policy: right for samples of the weights that they train."""

    uncorrected: bool = False  # also of samples that are older: naive PPO, for comparisons


class Truncated(TaggedVariant, frozen=True, tag="truncated"):
    """Weight by the proximal / behaviour ratio, cut at `cap` (truncated importance sampling)."""

    cap: Positive = 2.0  # largest weight


class Decoupled(TaggedVariant, frozen=True, tag="decoupled"):
    """Decoupled PPO (AReaL, arXiv:2505.24298, eq. 5): clip against the proximal policy, weigh by proximal/behaviour."""

    cap: Positive = 5.0  # largest weight
    exceed: Literal["mask", "clamp"] = "mask"  # tokens above the cap: left out, or weighed by it


class Masked(TaggedVariant, frozen=True, tag="masked"):
    """Decoupled PPO that leaves out what lies too far off the behaviour policy on either side: IcePop's mask
    (arXiv:2510.18855) per token, or whole samples by the geometric mean over their tokens."""

    low: NonNegative = 0.5  # smallest proximal / behaviour that counts
    high: Positive = 5.0  # largest
    level: Literal["token", "sequence"] = "token"  # of the ratio that is held against both


OffPolicy = Ignore | Truncated | Decoupled | Masked


class PolicyGradient(_LossTerm, frozen=True, tag="policy_gradient"):
    """The clipped surrogate of a ratio per token, per sequence (GSPO, arXiv:2507.18071) or none (REINFORCE)."""

    advantage: str = "advantages"  # key
    ratio: Literal["token", "sequence", "none"] = "token"  # of what the probability ratio is taken
    clip: Clip = field(default_factory=TwoSided)  # of the ratio
    off_policy: OffPolicy = field(default_factory=Ignore)  # correction for older samples

    outputs: ClassVar[tuple[Output, ...]] = ("logprobs",)

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        advantage = KeyRead(self.advantage, WEIGHT_TYPE, "advantage")
        return advantage, KeyRead(BEHAVIOUR_LOGPROBS, LOGPROBS_TYPE), KeyRead(VERSIONS, VERSIONS_TYPE)

    @property
    def needs_proximal(self) -> bool:
        return not isinstance(self.off_policy, Ignore)

    @property
    def idle_where_zero(self) -> str:
        return self.advantage


class KL(_LossTerm, frozen=True, tag="kl"):
    """coef x the estimated KL(policy || `to`) of every sampled token, with gradient."""

    to: str  # key of reference logprobs
    estimator: Estimator = "k3"  # Schulman's k1, k2, k3, or |log ratio|
    coef: NonNegative = 0.0  # weight of the term

    outputs: ClassVar[tuple[Output, ...]] = ("logprobs",)
    switched_by_coefficient: ClassVar[bool] = True

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return (KeyRead(self.to, LOGPROBS_TYPE, "to"),)

    @property
    def coefficient(self) -> float:
        return self.coef

    @property
    def compared_logprobs(self) -> str:
        return self.to


class Entropy(_LossTerm, frozen=True, tag="entropy"):
    """-coef x the entropy of the policy's distribution at every sampled token."""

    coef: float = 0.0  # weight of the bonus

    outputs: ClassVar[tuple[Output, ...]] = ("entropy",)

    @property
    def coefficient(self) -> float:
        return self.coef


class Value(_LossTerm, frozen=True, tag="value"):
    """Half the squared error of the critic, clipped around the old values (PPO2); `old` names them."""

    returns: str = "returns"  # key of the target
    clip: Positive | None = 0.2  # null: no clipping
    coef: NonNegative = 1.0  # weight of the term
    old: str = "values"  # key of the values before training

    outputs: ClassVar[tuple[Output, ...]] = ("values",)

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        target = KeyRead(self.returns, TOKEN_FLOAT_TYPE, "returns")
        return (target,) if self.clip is None else (target, KeyRead(self.old, VALUES_TYPE, "old"))

    @property
    def coefficient(self) -> float:
        return self.coef


class CrossEntropy(_LossTerm, frozen=True, tag="cross_entropy"):
    """Negative log-likelihood of the masked tokens; `key` names a weight per sample."""

    weight: NonNegative = 1.0  # of the term
    key: str | None = None  # weight per sample

    outputs: ClassVar[tuple[Output, ...]] = ("logprobs",)

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return () if self.key is None else (KeyRead(self.key, WEIGHT_TYPE, "key"),)

    @property
    def coefficient(self) -> float:
        return self.weight

    @property
    def sample_weight(self) -> str | None:
        return self.key


class Preference(_LossTerm, frozen=True, tag="preference"):
    """DPO (arXiv:2305.18290, eq. 7) over pairs: sample 0 of a group is preferred over sample 1."""

    beta: Positive = 0.1  # inverse temperature
    ref: str = "ref_logprobs"  # key of reference logprobs

    outputs: ClassVar[tuple[Output, ...]] = ("logprobs",)
    of_pairs: ClassVar[bool] = True

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return (KeyRead(self.ref, LOGPROBS_TYPE, "ref"),)

    @property
    def compared_logprobs(self) -> str:
        return self.ref


class PairwiseScore(_LossTerm, frozen=True, tag="pairwise_score"):
    """Bradley-Terry loss of a reward model over pairs (arXiv:2203.02155, eq. 1)."""

    outputs: ClassVar[tuple[Output, ...]] = ("scores",)
    of_pairs: ClassVar[bool] = True


class Distill(_LossTerm, frozen=True, tag="distill"):
    """Per-token divergence to a teacher's log-probabilities of the sampled tokens."""

    teacher: str  # key of the teacher's logprobs
    direction: Literal["forward", "reverse"] = "reverse"  # forward: KL(teacher || policy)

    outputs: ClassVar[tuple[Output, ...]] = ("logprobs",)

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return (KeyRead(self.teacher, LOGPROBS_TYPE, "teacher"),)

    @property
    def compared_logprobs(self) -> str:
        return self.teacher


class LoadBalance(_LossTerm, frozen=True, tag="load_balance"):
    """coef x the load-balancing loss of a mixture of experts (arXiv:2101.03961, eq. 4-6): of each micro-batch of a
    data-parallel rank, over all its tokens, weighed as the aggregation weighs its sampled tokens."""

    coef: NonNegative = 0.0  # weight of the term: `router_aux_loss_coef` of transformers, which asks for 0.001

    outputs: ClassVar[tuple[Output, ...]] = ()
    of_routes: ClassVar[bool] = True

    @property
    def coefficient(self) -> float:
        return self.coef


class ApplyTerm(_LossTerm, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, outputs, **args)`, a loss per token.

    It may look up the keys and the outputs (logprobs, entropy, values, scores) that `reads` names, and no others; where
    it names no output it gets logprobs.
    """

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys, and outputs of the trained role
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are
    over: Literal["sample", "group"] = "sample"  # group: each batch that it gets has its groups whole

    sees_idle: ClassVar[bool] = True

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Those that it reads, log-probabilities by default."""
        return tuple(name for name in OUTPUTS if name in self.reads) or ("logprobs",)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that its function may look up: what it reads and the forward pass does not give."""
        return tuple(key for key in self.reads if key not in OUTPUTS)

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return tuple(KeyRead(key, TENSOR_TYPE, f"reads[{self.reads.index(key)}]") for key in self.keys)

    @property
    def needs_whole_groups(self) -> bool:
        return self.over == "group"


Term = (
    PolicyGradient
    | KL
    | Entropy
    | Value
    | CrossEntropy
    | Preference
    | PairwiseScore
    | Distill
    | LoadBalance
    | ApplyTerm
)


class TokenMean(TaggedVariant, frozen=True, tag="token_mean"):
    """Sum over masked tokens / their number in the whole batch of the optimizer step."""


class SequenceMean(TaggedVariant, frozen=True, tag="sequence_mean"):
    """Mean over samples of each sample's mean over its masked tokens."""


class Constant(TaggedVariant, frozen=True, tag="constant"):
    """Sum over masked tokens / (samples x length): Dr.GRPO (arXiv:2503.20783)."""

    length: Annotated[int, Meta(ge=1)]  # tokens


class PairMean(TaggedVariant, frozen=True, tag="pair_mean"):
    """Mean over pairs of samples."""


Aggregate = TokenMean | SequenceMean | Constant | PairMean


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """A sum of terms under one aggregation; denominators are global over micro-batches and data-parallel ranks."""

    terms: dict[str, Term]  # added up
    aggregate: Aggregate = field(default_factory=TokenMean)  # from tokens to one number

    @property
    def needs_whole_groups(self) -> bool:
        """True where a term compares the samples of a group, so that a group may not be cut."""
        return isinstance(self.aggregate, PairMean) or any(term.needs_whole_groups for term in self.terms.values())

    @property
    def balances_routes(self) -> bool:
        """True where a term is of the routes to experts, of all layers together."""
        return any(term.of_routes for term in self.terms.values())
