"""Rules about functions that leave samples of groups out. What they write is a rule about keys."""

from collections.abc import Iterator

from realgraph.graphs.errors import Problem
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import KEEP, comparing, sample_filter
from realgraph.graphs.infer import Draft
from realgraph.graphs.spec import Function


def few_samples(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A group from which samples are left out goes on with some of its own, and with two where they are compared."""
    filtering, n = sample_filter(draft.spec.calls), draft.samples_per_group
    for name, call in draft.of(Function):
        asked, place = call.min_samples, f"$.calls.{name}.min_samples"
        if asked is None:
            continue
        if name != filtering:
            text = f"{name!r} leaves no samples out, so none of its groups is left with too few"
            yield draft.problem(place, text, f"write `{KEEP}: sample bool`, or delete `min_samples`")
        elif asked > n:
            text = f"no group has {asked} samples to go on with: it has {n} when it is made"
            yield draft.problem(place, text, f"set `min_samples` to {n} or less")
        elif asked == 1 < n:
            for entry in comparing(draft.spec.calls):
                text = f"{entry} compares the samples of a group, and of one that is left alone there is no other"
                yield draft.problem(place, text, "set `min_samples` to 2 or more; without it, it is 2")
