"""The steps of an advantage as data: a pipeline from rewards to advantages. Computes nothing."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.entries import Estimator, Fraction, KeyRead, NonNegative, PipelineEntry, Positive
from realgraph.graphs.keys import BASELINE_TYPE, BEHAVIOUR_LOGPROBS, LOGPROBS_TYPE, TENSOR_TYPE, VALUES_TYPE


class AdaptiveKL(Struct, frozen=True, forbid_unknown_fields=True):
    """A KL coefficient that follows a target (Ziegler et al. 2019, sec. 2.2): it is carried from step to step."""

    init: Positive  # first coefficient
    target: Positive  # nats per sample
    horizon: Positive = 10_000.0  # samples


class _AdvantageStep(PipelineEntry, frozen=True):
    """One step of an advantage."""

    makes_returns: ClassVar[bool] = False  # sums rewards over time, and leaves `returns`
    changes_reward: ClassVar[bool] = False  # stands before what turns rewards into advantages
    takes_baseline: ClassVar[bool] = False  # relates the running quantity to others of its kind

    @property
    def compares_samples(self) -> bool:
        """True where it compares the samples of a group with each other."""
        return False


class KLPenalty(_AdvantageStep, frozen=True, tag="kl_penalty"):
    """Subtract coef x the estimated KL to the logprobs key `to` from every sampled token's reward."""

    to: str  # key of reference logprobs
    coef: NonNegative | AdaptiveKL = 0.05  # a number, or a mapping: adaptive
    estimator: Estimator = "k1"  # Schulman's k1, k2, k3, or |log ratio|

    changes_reward: ClassVar[bool] = True
    switched_by_coefficient: ClassVar[bool] = True

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return KeyRead(self.to, LOGPROBS_TYPE, "to"), KeyRead(BEHAVIOUR_LOGPROBS, LOGPROBS_TYPE)

    @property
    def coefficient(self) -> float:
        return self.coef.init if isinstance(self.coef, AdaptiveKL) else self.coef

    @property
    def compared_logprobs(self) -> str:
        return self.to


class Overlong(_AdvantageStep, frozen=True, tag="overlong"):
    """DAPO's soft penalty (arXiv:2503.14476, eq. 13): from `start` response tokens on, falling to -1 at `limit`."""

    start: Annotated[int, Meta(ge=0)]  # response tokens
    limit: Annotated[int, Meta(ge=1)]  # response tokens

    changes_reward: ClassVar[bool] = True


class Center(_AdvantageStep, frozen=True, tag="center"):
    """Subtract a baseline: the mean of the group, of the group's other samples, of the batch, or a key."""

    by: Literal["group", "leave_one_out", "batch", "key"] = "group"  # which mean, or a key
    key: str | None = None  # with `by: key`: the baseline

    takes_baseline: ClassVar[bool] = True

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return (KeyRead(self.key, BASELINE_TYPE, "key"),) if self.by == "key" and self.key is not None else ()

    @property
    def compares_samples(self) -> bool:
        return self.by in ("group", "leave_one_out")


class Scale(_AdvantageStep, frozen=True, tag="scale"):
    """Divide by the standard deviation of the group or the batch, plus eps."""

    by: Literal["group", "batch"] = "group"  # which standard deviation
    eps: NonNegative = 1e-6  # against division by zero

    takes_baseline: ClassVar[bool] = True

    @property
    def compares_samples(self) -> bool:
        return self.by == "group"


class GAE(_AdvantageStep, frozen=True, tag="gae"):
    """Generalised advantage estimation over tokens (arXiv:1506.02438, eq. 16); also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token
    lam: Fraction = 0.95  # bias against variance
    values: str = "values"  # key of the critic's values

    makes_returns: ClassVar[bool] = True

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return (KeyRead(self.values, VALUES_TYPE, "values"),)


class Return(_AdvantageStep, frozen=True, tag="return"):
    """Discounted reward-to-go of every token; also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token

    makes_returns: ClassVar[bool] = True


class ApplyStep(_AdvantageStep, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, running, **args)`."""

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys it looks up beside those of its call
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        return tuple(KeyRead(key, TENSOR_TYPE, f"reads[{i}]") for i, key in enumerate(self.reads))


Step = KLPenalty | Overlong | Center | Scale | GAE | Return | ApplyStep
