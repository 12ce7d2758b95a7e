"""Notes about a run that goes on but learns nothing. Reads a step's flat metrics; changes nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence

from realgraph.graphs.maths import Decoupled, Masked, OffPolicy, PolicyGradient
from realgraph.graphs.spec import ModelCall, Train
from realgraph.runtime.commands.failures import prompt_limits

FLAT_STEPS = 5  # in a row, before equal rewards are worth a note
FLAT_TOLERANCE = 1e-9  # relative to the mean square: below it rewards differ by rounding only
SKIPPED = "batch/skipped_groups"
MASKED_SHARE = 0.05  # of sampled tokens that are masked, for their age or by `off_policy`: more is worth a note


class Advice:
    """Looks at each step; every note is given once a run. calls: of the run's graph; prompted: those of them that
    generate from what other calls write."""

    def __init__(self, calls: Mapping[str, ModelCall], prompted: Sequence[str] = ()) -> None:
        self._limits = ", ".join(f"`{limit}`" for limit in prompt_limits(prompted))
        self._masks = dict(_masks(calls))
        self._flat: dict[str, int] = {}  # call -> steps in a row whose rewards were all equal
        self._given: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Lines to tell after a step."""
        yield from self._equal_rewards(metrics)
        for name, value in metrics.items():
            call, _, what = name.rpartition("/")
            overdue = metrics.get(f"{call}/overdue", 0.0)
            old = (
                f"{overdue:.0%} of its sampled tokens were older than `staleness` allows and were left out of the loss"
            )
            hint = _fix(metrics)
            if name == SKIPPED and value and self._first(name):
                yield (
                    f"{value:.0f} rows of this step were left out, since their prompts or sequences are too long: "
                    f"raise {self._limits} or `batch.max_new_tokens`, or set `data.too_long`"
                )
            elif what == "failed" and value and self._first(name):
                yield (
                    f"{value:.0%} of the executions of {call} failed and have its `error_value`: logs/worker-N.log of "
                    "the run directory says why"
                )
            elif what == "empty_steps" and value and self._first(name):
                yield (
                    f"{call} took no optimizer step for {value:.0f} of its mini-batches: no token had a part in the "
                    f"loss; {f'{old}: {hint}' if overdue else 'all of them are masked, or weigh nothing'}"
                )
            elif what == "overdue" and value > MASKED_SHARE and self._first(name):
                yield f"{call}: {old}; {hint}"
            elif name in self._masks and value > MASKED_SHARE and self._first(name):
                off, widen = self._masks[name]
                yield (
                    f"{call}: {value:.0%} of its sampled tokens were left out of the loss by `off_policy`: the policy "
                    f"gives them {off} the probability that they were drawn with; {_younger(metrics)}{widen}"
                )

    def _first(self, name: str) -> bool:
        """True where this note has not been given yet; from now on it has."""
        first = name not in self._given
        self._given.add(name)
        return first

    def _equal_rewards(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for name, square in metrics.items():
            call, _, what = name.rpartition("/")
            if what != "reward_square":
                continue
            mean = metrics[f"{call}/reward"]
            flat = square - mean * mean <= FLAT_TOLERANCE * max(square, FLAT_TOLERANCE)
            self._flat[call] = self._flat.get(call, 0) + 1 if flat else 0
            if self._flat[call] == FLAT_STEPS:
                yield (
                    f"every reward of the last {FLAT_STEPS} steps was {mean:.4g}: there is nothing to learn from; "
                    "look at the samples, the reward function, and whether answers are cut at batch.max_new_tokens"
                )


def _masks(calls: Mapping[str, ModelCall]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The metrics that say how many tokens a loss's `off_policy` has left out, each with how far off those are, and
    with what leaves out fewer."""
    for call, spec in calls.items():
        terms = spec.loss.terms.items() if isinstance(spec, Train) else ()
        for name, term in terms:
            if isinstance(term, PolicyGradient) and (words := _mask_of(term.off_policy)) is not None:
                off, widen = words
                fix = f"{widen} at `calls.{call}.loss.terms.{name}.off_policy`"
                yield f"{call}/masked_share", (off, fix)
                yield f"{call}/{name}_masked_share", (off, fix)  # beside other terms of its kind


def _mask_of(correction: OffPolicy) -> tuple[str, str] | None:
    """None where it leaves out no token."""
    match correction:
        case Decoupled(cap=cap, exceed="mask"):
            return f"over {cap:g} times", f"raise `cap` above {cap:g}, or set `exceed: clamp`,"
        case Masked(low=low, high=high):
            return f"under {low:g} or over {high:g} times", f"widen `low: {low:g}` and `high: {high:g}`"
        case _:
            return None


def _younger(metrics: Mapping[str, float]) -> str:
    """The bound and the concurrency that make the tokens of this step younger; where none is old, another cause."""
    oldest = metrics.get("staleness/p95", 0.0)
    if not oldest:
        return "they are of the newest weights, so generation and training differ (`logprob_gap`); or "
    bound = f"lower `staleness` to {math.ceil(oldest) - 1}: 95% of this step's groups were up to {oldest:.0f} steps old"
    return f"{bound}{_fewer(metrics)}, or "


def _fewer(metrics: Mapping[str, float]) -> str:
    """A smaller concurrency; none where one sequence ran at once, or it is not known."""
    running = max((value for name, value in metrics.items() if name.endswith("/running")), default=0.0)
    return f", set `rollout.max_running` below the {running:.0f} sequences that ran at once" if running >= 2 else ""


def _fix(metrics: Mapping[str, float]) -> str:
    """A bound that 95 % of this step's groups would have kept, oldest token and all, and what else helps."""
    kept = metrics.get("staleness/p95", 0.0)
    bound = (
        f"raise `staleness` to {kept:.0f}, which 95% of this step's groups would keep" if kept else "raise `staleness`"
    )
    return f"{bound}{_fewer(metrics)}, or set `overdue` to wait"
