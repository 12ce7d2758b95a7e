"""The steps of an advantage as data: a pipeline from rewards to advantages. Computes nothing."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.entries import Entry, Estimator, Fraction, NonNegative, Positive


class AdaptiveKL(Struct, frozen=True, forbid_unknown_fields=True):
    """A KL coefficient that follows a target (Ziegler et al. 2019, sec. 2.2): it is carried from step to step."""

    init: Positive  # first coefficient
    target: Positive  # nats per sample
    horizon: Positive = 10_000.0  # samples


class KLPenalty(Entry, frozen=True, tag="kl_penalty"):
    """Subtract coef x the estimated KL to the logprobs key `to` from every sampled token's reward."""

    to: str  # key of reference logprobs
    coef: NonNegative | AdaptiveKL = 0.05  # a number, or a mapping: adaptive
    estimator: Estimator = "k1"  # Schulman's k1, k2, k3, or |log ratio|


class Overlong(Entry, frozen=True, tag="overlong"):
    """DAPO's soft penalty (arXiv:2503.14476, eq. 13): from `start` response tokens on, falling to -1 at `limit`."""

    start: Annotated[int, Meta(ge=0)]  # response tokens
    limit: Annotated[int, Meta(ge=1)]  # response tokens


class Center(Entry, frozen=True, tag="center"):
    """Subtract a baseline: the mean of the group, of the group's other samples, of the batch, or a key."""

    by: Literal["group", "leave_one_out", "batch", "key"] = "group"  # which mean, or a key
    key: str | None = None  # with `by: key`: the baseline


class Scale(Entry, frozen=True, tag="scale"):
    """Divide by the standard deviation of the group or the batch, plus eps."""

    by: Literal["group", "batch"] = "group"  # which standard deviation
    eps: NonNegative = 1e-6  # against division by zero


class GAE(Entry, frozen=True, tag="gae"):
    """Generalised advantage estimation over tokens (arXiv:1506.02438, eq. 16); also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token
    lam: Fraction = 0.95  # bias against variance
    values: str = "values"  # key of the critic's values


class Return(Entry, frozen=True, tag="return"):
    """Discounted reward-to-go of every token; also writes `returns`."""

    gamma: Fraction = 1.0  # discount per token


class ApplyStep(Entry, frozen=True, tag="apply"):
    """The user's own pure function `module:function` of packed tensors: `fn(batch, running, **args)`."""

    fn: str  # module:function
    reads: tuple[str, ...] = ()  # keys it looks up beside those of its call
    args: dict[str, Any] = field(default_factory=dict)  # keywords, as they are


Step = KLPenalty | Overlong | Center | Scale | GAE | Return | ApplyStep
