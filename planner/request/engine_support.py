"""The abilities of engines: one value an engine kind gives. Planner, validation and the engines themselves read it.

A new engine, or a new ability of one, is an edit here; what it is worth is `planner/costs`' business.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from realgraph.graphs.spec import Generate, ModelCall
from realgraph.planner.costs.memory.terms import DType
from realgraph.planner.plan.layout import Recompute, Schedule
from realgraph.planner.plan.plan import Transport
from realgraph.planner.request.cost_table import Phase

Axis = Literal["tp", "pp", "ep", "cp"]


class EngineSupport(Struct, frozen=True):
    """The abilities of the engines of one kind. Data parallelism, whole weights and FSDP2 every engine has."""

    name: str = "the embedded engines"  # in messages
    axes: tuple[Axis, ...] = ()  # of parallelism, besides dp, of calls that train or infer
    # of calls that generate; cp is none of any engine's, as a decode step has one token a sequence
    generate_axes: tuple[Axis, ...] = ()
    # kinds of calls whose weights and optimizer states may wait in the host's memory between two of them
    offload: tuple[Phase, ...] = ("train", "inference", "generate")
    cuts_served_experts: bool = True  # a generate call's tp cuts experts further where ep alone leaves more on a device
    drops_copies: bool = False  # a copy of trained weights may be given up after its call, and brought again
    dtypes: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float64")  # of weights and activations
    # of trained weights to a copy of a call's own; a call that reads the trained copy in place needs none
    transports: tuple[Transport, ...] = ("device",)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")  # what a plan may choose
    schedules: tuple[Schedule, ...] = ("1f1b",)  # of pipeline stages
    max_running: int = 1024  # sequences that decode at once on one replica
    records_routes: bool = False  # generate calls tell which experts each token went to

    def axes_of(self, *, generates: bool) -> tuple[Axis, ...]:
        """The axes of parallelism, besides dp, of a call."""
        return self.generate_axes if generates else self.axes

    def serves(self, call: ModelCall) -> bool:
        """True of a call whose experts tp cuts although they are spread: see `cuts_served_experts`."""
        return isinstance(call, Generate) and self.cuts_served_experts


TORCH = EngineSupport(
    axes=("tp", "pp", "ep", "cp"),
    generate_axes=("tp", "pp", "ep"),
    cuts_served_experts=False,
    drops_copies=True,
    schedules=("1f1b", "interleaved"),
    records_routes=True,
)
TORCH_KIND = "torch"
SUPPORT: dict[str, EngineSupport] = {TORCH_KIND: TORCH}  # kind -> support


def axes_text(axes: Sequence[Axis]) -> str:
    """`dp, tp and cp`: these axes and dp."""
    *names, last = ("dp", *axes)
    return f"{', '.join(names)} and {last}" if names else last


def run_support() -> EngineSupport:
    """The abilities of the engines that a run uses."""
    return SUPPORT[TORCH_KIND]
