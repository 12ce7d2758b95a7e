"""Ages of tokens when they are trained: those of a batch, and predicted ones, from lengths of trained groups. Pure.

A token waits for the longest sample of its group, and then, with its group, for the step that trains it. How long the
first takes, in steps, follows from the work in flight; the second is taken to be what it was.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from realgraph.runtime.wire.protocol import Sample


class BatchedGroup(Struct, frozen=True):
    """A group that a batch takes. lengths: new tokens of its samples; n_old: those of them all beyond the bound."""

    group: int
    lengths: tuple[int, ...]
    n_old: int


def batched_group(group: int, samples: Sequence[Sample], oldest: int) -> BatchedGroup:
    """A group of these samples. oldest: version that is within the bound."""
    lengths = tuple([sample.n_new_tokens for sample in samples])
    return BatchedGroup(group, lengths, sum([sample.n_before(oldest) for sample in samples]))


class TrainedGroup(Struct, frozen=True, array_like=True):
    """A group that a batch has taken."""

    lengths: tuple[int, ...]  # new tokens of its samples
    # The age of its last token, less the part of a step that had passed when it was drawn: a token that was drawn so
    # many steps before, and a part, is a step older for each whole step.
    waited: float


def masked_share(groups: Iterable[TrainedGroup], bound: int, token_steps: float) -> float:
    """Share of the tokens of these groups that would be trained more than `bound` steps late.

    token_steps: steps that begin, on average, while the longest sample of a group gets a token; above 0.
    """
    n_old = n_tokens = 0.0
    for group in groups:
        young = max(0.0, bound - group.waited) / token_steps  # the last tokens of the longest sample
        old = max(group.lengths) - young
        for length in group.lengths:
            n_tokens += length
            n_old += min(float(length), max(0.0, old))
    return n_old / n_tokens if n_tokens else 0.0
