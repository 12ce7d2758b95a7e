"""The entry of a pipeline as data: the base of advantage steps and loss terms, and the numbers that both take."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from realgraph.graphs.keys import Requirement

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Estimator = Literal["k1", "k2", "k3", "abs"]


class KeyRead(Struct, frozen=True):
    """A key that an entry of a pipeline reads."""

    key: str
    requires: Requirement
    field: str = ""  # of the entry, where the user names the key; empty where the entry implies it


class TaggedVariant(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One of several kinds of a thing, written by the user."""


class PipelineEntry(TaggedVariant, frozen=True):
    """One entry of a pipeline: an advantage step or a loss term."""

    switched_by_coefficient: ClassVar[bool] = False  # the coefficient 0 is how users switch it off

    @property
    def key_reads(self) -> tuple[KeyRead, ...]:
        """The keys that it needs beside tokens, mask and, for a step, the running reward."""
        return ()

    @property
    def coefficient(self) -> float:
        """Its weight; at 0 it has no part in the result."""
        return 1.0

    @property
    def compared_logprobs(self) -> str | None:
        """The key of the log-probabilities that it compares with the policy's, at the policy's temperature."""
        return None
