"""Asynchronous over synchronous RL by the number of GPUs, on the clock, beside AReaL's published ratios.

Run from the repository root: `python -m benchmarks.async_scale`. The very Scheduler drives workers that take the cost
model's seconds (`clocked.py`); no GPU is needed. All rows share their settings (arXiv:2505.24298; its benchmark folder,
v0.3.0): H800s, 512 prompts x 16 answers, four mini-batches, log-normal lengths with the published mean and share of cut
answers, cut anew where the context is shorter; three quarters of the devices generate, each by itself, the others train
in two pipeline stages (1.5B) or four (7B), at a staleness of 4. The peers are the best synchronous plans that the
search finds: all calls on all devices, which the judged ratios of figure 4 are over, and the best of several splits of
the devices. Figure 4's own peer is another system as AReaL's authors set it; in 5c and 6b it is AReaL itself. Beside
them stands what the search predicts of its own asynchronous plan. *Ideal* is a step of calls that never wait:
synchronous, the sum of their seconds; asynchronous, the slower side's, with generation at full slots. No constant
belongs to a row. Rows of 1,024 GPUs are extrapolations: nothing is published to compare them with.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.clocked import GRPO, ClockedPlan, planned, verdict
from benchmarks.machine import describe
from benchmarks.published_assumed import AREAL_BATCH, AREAL_CUT, AREAL_TOKENS, N_QUANTILES, lengths_with_cut
from realgraph.planner.plan.layout import Layout
from realgraph.planner.search.search import Infeasible
from realgraph.run.requests import RequestOptions
from realgraph.runtime.job.rollout import Interrupt

RESULTS = Path(__file__).parent / "results" / "async_scale.json"
TOLERANCE = 0.20  # of a published ratio
EVEN = 0.02  # a published ratio so near to 1 is on neither side of the crossover
STEPS = 30
STALENESS = 4
PROMPT = 600  # longest; the planner takes a quarter, 150 tokens, as the mean
CONTEXT = 16_384  # of figure 4
PER_NODE = 8
EXTRAPOLATED = 1024  # GPUs
SPLITS = (0.25, 0.5, 0.75)  # shares of the devices that generate, of which the best is taken


class Series(Struct, frozen=True):
    """A model of figure 4. published: GPUs -> AReaL's speed over its synchronous peer's."""

    name: str
    path: str
    stages: int  # of the trainer's pipeline
    published: dict[int, float]
    interrupted: float  # figure 6b: speed with interruptions over that without


SMALL = Series(
    "1.5B",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    2,
    {32: 1.00, 64: 1.21, 128: 1.70, 256: 1.89},
    1.12,
)
LARGE = Series("7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 4, {64: 0.85, 128: 1.07, 256: 1.32, 512: 1.47}, 1.17)
BOUNDS = {0: 1.0, 1: 2.09, 2: 2.77, 4: 2.77, 8: 2.89}  # figure 5c, 1.5B: staleness -> speed over that of 0
BOUND_GPUS = 128  # the speeds of 5c agree with the hours of v0.3's table on so many
INTERRUPT_GPUS = 32  # figure 6b: four nodes


class Reached(Struct, frozen=True):
    """The steady state of a plan on the clock. masked: share of the tokens beyond the bound."""

    seconds: float  # of a step
    ideal: float  # the same, of calls that never wait
    staleness: int
    masked: float
    mean_age: float
    layouts: dict[str, str]


class Row(Struct, frozen=True):
    """A ratio of speeds beside the published one, which is 0 where there is none."""

    what: str
    ratio: float
    published: float
    passed: bool


def lengths(limit: int) -> tuple[int, ...]:
    """New tokens of answers at equal steps of probability, cut at `limit`."""
    mean = AREAL_TOKENS[0][1] / AREAL_BATCH.samples - AREAL_BATCH.prompt
    known = lengths_with_cut(mean, AREAL_BATCH.limit, AREAL_CUT)
    return tuple(min(limit, round(known.quantile((i + 0.5) / N_QUANTILES))) for i in range(N_QUANTILES))


def plan_for(series: Series, gpus: int, limit: int, *more: str, levels: tuple[int, ...] = ()) -> ClockedPlan:
    """The best plan of a model on so many H800s that keeps to these overrides."""
    overrides = [
        f"models.actor={{path: {series.path}, dtype: bfloat16, gradient_checkpointing: true}}",
        *("cluster.kind=H800", f"cluster.nodes={gpus // PER_NODE}", f"steps={STEPS}"),
        *(f"params.group_size={AREAL_BATCH.per_group}", f"params.minibatches={AREAL_BATCH.steps}"),
        f"batch.groups={AREAL_BATCH.samples // AREAL_BATCH.per_group}",
        *(f"batch.max_new_tokens={limit}", f"data.max_prompt_tokens={PROMPT}"),
    ]
    return planned(GRPO, *overrides, *more, asked=RequestOptions(lengths=lengths(limit)), levels=levels)


def apart(series: Series, gpus: int) -> tuple[str, str]:
    """AReaL's meshes and layouts."""
    generate = gpus * 3 // 4
    return (
        f"allocation.rollout={{first: 0, devices: {generate}, tp: 1, pp: 1}}",
        f"allocation.train={{first: {generate}, devices: {gpus - generate}, tp: 1, pp: {series.stages}}}",
    )


def best_apart(series: Series, gpus: int, limit: int, bound: int) -> ClockedPlan:
    """The best plan with meshes apart, over several splits: layouts are the search's."""
    plans = []
    for share in SPLITS:
        generate = round(gpus * share)
        meshes = (
            f"allocation.rollout={{first: 0, devices: {generate}}}",
            f"allocation.train={{first: {generate}, devices: {gpus - generate}}}",
        )
        try:
            plans.append(plan_for(series, gpus, limit, f"staleness={bound}", *meshes, levels=(bound,)))
        except Infeasible:  # so few devices don't hold it
            continue
    return min(plans, key=lambda one: one.plan.period_seconds)


def colocated(series: Series, gpus: int, limit: int) -> Reached:
    return reached(plan_for(series, gpus, limit, "staleness=0", "constraints.colocated=true"))


def on_meshes(series: Series, gpus: int, limit: int, bound: int, interrupt: Interrupt = "recompute") -> Reached:
    """On AReaL's meshes, at this staleness."""
    more = (f"staleness={bound}", f"rollout.interrupt={interrupt}", *apart(series, gpus))
    return reached(plan_for(series, gpus, limit, *more, levels=(bound,)))


def reached(plan: ClockedPlan) -> Reached:
    """Run it."""
    clock, bound = plan.clock(), plan.plan.staleness
    seconds = clock.period()
    ages = clock.steady_ages() if bound else {}
    shown = {name: layout_text(one.layout) for name, one in plan.plan.allocations.items()}
    return Reached(
        seconds=seconds,
        ideal=ideal_seconds(plan),
        staleness=bound,
        masked=sum(share for age, share in ages.items() if age > bound),
        mean_age=sum(age * share for age, share in ages.items()),
        layouts=shown,
    )


def layout_text(layout: Layout) -> str:
    axes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    return " ".join(f"{axis}{n}" for axis, n in axes.items() if n > 1)


def ideal_seconds(plan: ClockedPlan) -> float:
    """Seconds of a step whose calls never wait: for each other where it is synchronous, for a last sequence else."""
    seconds = {name: one.seconds for name, one in plan.plan.allocations.items()}
    prices = plan.prices
    if prices is None:
        return sum(seconds.values())
    share, known = prices.stream.share, prices.stream.lengths
    running = min(prices.slots, int(prices.stream.slots))
    token = prices.fixed[running] + prices.each[running] * (prices.prompt_tokens + known.mean_age)
    others = sum(value for name, value in seconds.items() if name != "rollout")
    return max(share * (known.mean / running * token + prices.start), others)


def judged(what: str, ratio: float, published: float) -> Row:
    return Row(what, round(ratio, 3), published, abs(ratio / published - 1) <= TOLERANCE)


def on_the_right_side(series: Series, ratios: dict[int, float]) -> bool:
    """Slower where the peer is published to be faster, and the other way round."""
    uneven = {gpus: ratio for gpus, ratio in series.published.items() if abs(ratio - 1) > EVEN}
    return all((ratios[gpus] > 1) == (ratio > 1) for gpus, ratio in uneven.items())


# --- what is measured -------------------------------------------------------------------------------------------------


def scaled(series: Series, cases: list[dict[str, object]]) -> Iterator[Row]:
    """Figure 4, and beyond it."""
    ratios: dict[int, float] = {}
    for gpus in (*series.published, EXTRAPOLATED):
        limit = CONTEXT - PROMPT
        together, turns = colocated(series, gpus, limit), reached(best_apart(series, gpus, limit, 0))
        stream = on_meshes(series, gpus, limit, STALENESS)
        own = best_apart(series, gpus, limit, STALENESS).plan.period_seconds
        ratios[gpus] = ratio = together.seconds / stream.seconds
        case = {"colocated": together, "apart": turns, "stream": stream, "searched_stream_seconds": own}
        cases.append({"model": series.name, "gpus": gpus, **case})
        what = f"{series.name} on {gpus} GPUs"
        text = f"seconds of a step: colocated {together.seconds:.1f} (ideal {together.ideal:.1f}), apart "
        text += f"{turns.seconds:.1f} ({turns.ideal:.1f}), asynchronous {stream.seconds:.1f} ({stream.ideal:.1f}), "
        text += f"{turns.seconds / stream.seconds:.2f}x over apart, {stream.masked:.1%} masked"
        print(f"  {what}: {text}; the search's own asynchronous plan: {own:.1f}", flush=True)
        if gpus in series.published:
            yield judged(what, ratio, series.published[gpus])
        else:
            yield Row(f"{what}, extrapolated", round(ratio, 3), 0.0, True)
    right = on_the_right_side(series, ratios)
    yield Row(f"{series.name}, crossover on the right side", float(right), 1.0, right)


def bounded(cases: list[dict[str, object]]) -> Iterator[Row]:
    """Figure 5c."""
    first = 0.0
    for bound, published in BOUNDS.items():
        found = on_meshes(SMALL, BOUND_GPUS, AREAL_BATCH.limit, bound)
        first = first or found.seconds
        cases.append({"model": SMALL.name, "gpus": BOUND_GPUS, "bound": found})
        yield judged(f"staleness {bound} over 0, {found.masked:.1%} masked", first / found.seconds, published)


def interrupted(series: Series, cases: list[dict[str, object]]) -> Iterator[Row]:
    """Figure 6b."""
    limit = AREAL_BATCH.limit
    ways: tuple[Interrupt, Interrupt] = ("recompute", "wait")
    going, waiting = (on_meshes(series, INTERRUPT_GPUS, limit, STALENESS, way) for way in ways)
    cases.append({"model": series.name, "gpus": INTERRUPT_GPUS, "recompute": going, "wait": waiting})
    yield judged(f"interrupt over wait, {series.name}", waiting.seconds / going.seconds, series.interrupted)


def small(cases: list[dict[str, object]]) -> list[Row]:
    return list(scaled(SMALL, cases))


def large(cases: list[dict[str, object]]) -> list[Row]:
    return list(scaled(LARGE, cases))


def others(cases: list[dict[str, object]]) -> list[Row]:
    return [*bounded(cases), *interrupted(SMALL, cases), *interrupted(LARGE, cases)]


def measured(part: Callable[[list[dict[str, object]]], list[Row]]) -> tuple[list[Row], list[dict[str, object]]]:
    """A part's rows and what they come from."""
    cases: list[dict[str, object]] = []
    return part(cases), cases


def main() -> int:
    """Measure, print, write the results; 1 where a ratio is off."""
    found: list[Row] = []
    cases: list[dict[str, object]] = []
    with ProcessPoolExecutor(2) as pool:
        for rows, more in pool.map(measured, (small, large, others)):
            found += rows
            cases += more
    for row in found:
        beside = f"published {row.published:.2f}, {row.ratio / row.published - 1:+.0%}" if row.published else "none"
        shown = verdict(passed=row.passed) if row.published else "not judged"
        print(f"{row.what:<46} {row.ratio:6.2f}   {beside:<22} {shown}", flush=True)
    passed = all(row.passed for row in found)
    report = {"machine": describe(), "tolerance": TOLERANCE, "passed": passed, "rows": found, "cases": cases}
    RESULTS.write_bytes(msgspec.json.format(json.dumps(msgspec.to_builtins(report)).encode(), indent=1) + b"\n")
    missed = sum(not row.passed for row in found)
    print(f"{verdict(passed=passed)}: within {TOLERANCE:.0%} of the published ratios, {missed} rows missed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
