"""The abilities of engines: one value an engine kind gives. Planner, validation and the engines themselves read it.

A new engine, or a new ability of one, is an edit here; what it is worth is `planner/costs`' business.
"""

from typing import Literal

from msgspec import Struct

from realgraph.planner.plan.layout import Recompute, Schedule

Axis = Literal["tp", "pp", "ep", "cp"]


class EngineSupport(Struct, frozen=True):
    """The abilities of the engines of one kind. Data parallelism, whole weights and FSDP2 every engine has."""

    name: str = "the engines of this version"  # in messages
    axes: tuple[Axis, ...] = ()  # of parallelism, besides dp
    offload: bool = False  # weights and optimizer states may wait in the host's memory
    drops_copies: bool = False  # a copy of trained weights may be given up after its call, and brought again
    recompute: tuple[Recompute, ...] = ("none",)  # what a plan may choose; the role's own setting may say `full`
    schedules: tuple[Schedule, ...] = ("1f1b",)  # of pipeline stages
    paged_cache: bool = False  # sequences take what they have now; else places for whole samples
    max_running: int = 128  # sequences that decode at once on a GPU
    max_running_cpu: int = 256

    def running(self, *, cpu: bool) -> int:
        """Sequences that decode at once on one replica."""
        return self.max_running_cpu if cpu else self.max_running


TORCH = EngineSupport()
EVERY = EngineSupport(
    name="some engine",
    axes=("tp", "pp", "ep", "cp"),
    offload=True,
    drops_copies=True,
    recompute=("none", "selective", "full"),
    schedules=("1f1b", "interleaved"),
    paged_cache=True,
    max_running=1024,
    max_running_cpu=1024,
)  # the whole space of plans: what engines of several systems can do together
TORCH_KIND = "torch"
SUPPORT: dict[str, EngineSupport] = {TORCH_KIND: TORCH}  # kind -> support, of the engines that this version has


def installed() -> EngineSupport:
    """The abilities of the engines that a run uses."""
    return SUPPORT[TORCH_KIND]
