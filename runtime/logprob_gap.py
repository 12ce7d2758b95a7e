"""The gap between what generated and what trains: mean difference of their log-probabilities of the same tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realgraph.runtime.job.job import Job
from realgraph.runtime.wire.metrics import Mean

MAX_LOGPROB_GAP = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # mean nats a sampled token
LEAST_TOKENS = 32  # of an engine that is judged by itself: of fewer a single one that rounding hits hard decides


class LogprobGap(ArithmeticError):
    """Generator and trainer disagree about the probability of the sampled tokens: no ratio can be trusted."""


@dataclass(frozen=True)
class EngineGap:
    """The gap of one engine, over tokens that it has drawn under weights of one version. All in nats."""

    engine: str  # as errors name it
    version: int
    gap: float  # mean |drawn - recomputed|
    drawn: float  # mean log-probability, as the engine gave it
    recomputed: float  # by the trainer


def logprob_limit(job: Job, role: str) -> float:
    """Mean difference of log-probabilities, in nats, that generator and trainer of `role` may have."""
    return job.runtime.max_logprob_gap or MAX_LOGPROB_GAP[job.graph.models[role].dtype]


def engine_name(worker: int, address: str) -> str:
    """An engine as errors name it. address: of its server, if any."""
    return f"the SGLang server {address} of worker {worker}" if address else f"the engine of worker {worker}"


def gaps_of(sums: Sequence[Sequence[float]], engines: Sequence[int], version: int) -> list[EngineGap]:
    """The gaps of engines with enough tokens under weights of `version`. sums: of each, its tokens, and the sums of
    |drawn - recomputed|, drawn and recomputed log-probabilities, in nats. engines: their workers."""
    return [
        EngineGap(engine_name(worker, ""), version, *(total / n_tokens for total in totals))
        for worker, (n_tokens, *totals) in zip(engines, sums, strict=True)
        if n_tokens >= LEAST_TOKENS
    ]


def worst_of(gaps: Sequence[EngineGap]) -> EngineGap:
    """The engine that is farthest off; one whose gap is no number is."""
    return max(gaps, key=lambda one: math.inf if math.isnan(one.gap) else one.gap)


def check_gap(gap: Mean, limit: float, when: str, temperature: float, *, agreed: bool) -> None:
    """Raises LogprobGap for a mean difference over `limit`, both in nats. agreed: they did before, in this run."""
    if not gap.value <= limit:
        raise LogprobGap(
            f"{when} the generator's log-probabilities are {gap.value:.3g} nats away from the trainer's on "
            f"average, {limit:.3g} are allowed: {_reason(temperature, agreed=agreed)}"
        )


def check_engines(gaps: Sequence[EngineGap], limit: float, when: str, temperature: float, *, agreed: bool) -> None:
    """`check_gap` for each engine by itself: raises LogprobGap with the worst."""
    over = [one for one in gaps if not one.gap <= limit]
    if not over:
        return
    worst, others = worst_of(over), len(gaps) - 1
    rest = f"; of {others} other engines {len(over) - 1 or 'none'} differ by more than that" if others else ""
    raise LogprobGap(
        f"{when} the log-probabilities of {worst.engine}, which has the weights of version {worst.version}, are "
        f"{worst.gap:.3g} nats away from the trainer's on average, {limit:.3g} are allowed "
        f"by `runtime.max_logprob_gap`: its own mean is {worst.drawn:.3g}, the trainer's {worst.recomputed:.3g}{rest}; "
        f"{_reason(temperature, agreed=agreed)}"
    )


def _reason(temperature: float, *, agreed: bool) -> str:
    if agreed:
        return "they agreed before, so a weight update of the generator has failed"
    return f"weights, temperature ({temperature:g}) or precision differ"
