"""The gap between what generated and what trains: mean difference of their log-probabilities of the same tokens."""

from realgraph.runtime.wire.protocol import Mean


class LogprobGap(ArithmeticError):
    """Generator and trainer disagree about the probability of the sampled tokens: no ratio can be trusted."""


def check_gap(gap: Mean, limit: float, when: str, temperature: float, *, agreed: bool) -> None:
    """Raises LogprobGap for a mean difference over `limit`, both in nats. agreed: they did before, in this run."""
    if not gap.value <= limit:
        differs = f"weights, temperature ({temperature:g}) or precision differ"
        reason = "they agreed before, so a weight update of the generator has failed" if agreed else differs
        raise LogprobGap(
            f"{when} the generator's log-probabilities are {gap.value:.3g} nats away from the trainer's on "
            f"average, {limit:.3g} are allowed: {reason}"
        )
