"""Numbers about calls, which merge over workers."""

from collections.abc import Mapping

from msgspec import Struct


class Mean(Struct, frozen=True, gc=False, tag="mean"):
    """A mean that can be merged: sum / weight."""

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)


class Max(Struct, frozen=True, gc=False, tag="max"):
    """A maximum, merged by the larger."""

    value: float

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.value, other.value))


Metric = Mean | Max


def merge(metrics: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Add `more` to `metrics`, name by name."""
    for name, metric in more.items():
        match metrics.get(name), metric:
            case None, _:
                metrics[name] = metric
            case Mean() as held, Mean():
                metrics[name] = held + metric
            case Max() as held, Max():
                metrics[name] = held + metric
            case _:
                raise AssertionError(f"the metric {name!r} is a mean in one place and a maximum in another")
