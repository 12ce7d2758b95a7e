"""Numbers that workers report of their calls, and how those of several workers merge."""

from collections.abc import Mapping

from msgspec import Struct

PEAK_BYTES = "peak_bytes"  # a metric: the most bytes on a worker's device while it ran a call
PREFETCHED_BYTES = "prefetched_bytes"  # a metric: of the call's states, that began to come while the call before ran


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
            case Mean() as own, Mean():
                metrics[name] = own + metric
            case Max() as own, Max():
                metrics[name] = own + metric
            case _:
                raise AssertionError(f"the metric {name!r} is a mean in one place and a maximum in another")


class ArrivedBytes(Struct, frozen=True, gc=False):
    """Bytes of samples or weights that came to a worker from others: of its host, and of other hosts."""

    near: int = 0
    far: int = 0

    def __add__(self, other: "ArrivedBytes") -> "ArrivedBytes":
        return ArrivedBytes(self.near + other.near, self.far + other.far)


class ResidentBytes(Struct, frozen=True, gc=False):
    """Bytes on a worker's device of its part of a role's weights, of their gradients at most, and of masters and
    moments; counted tensor by tensor."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
