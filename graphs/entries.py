"""The entry of a pipeline as data: the base of advantage steps and loss terms, and the numbers that both take."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Estimator = Literal["k1", "k2", "k3", "abs"]


class Entry(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One entry of a pipeline: a tagged variant, written by the user."""
