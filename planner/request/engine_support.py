"""The abilities of engines: one value an engine kind gives. Planner, validation and the engines themselves read it.

A new engine, or a new ability of one, is an edit here; what it is worth is `planner/costs`' business.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from realgraph.graphs.spec import Generate, ModelCall
from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.engine_overheads import NO_OVERHEADS, EngineOverheads
from realgraph.planner.costs.memory.activations import PLAIN_PASSES, Running
from realgraph.planner.costs.memory.memory import StateShare
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
    masks_windows: bool = False  # generate calls read the whole cache in windowed layers too, under masks
    expert_copies: bool = False  # between nodes a token's row is sent once for each of its experts (costs/backend.py)
    experts_in_replica: bool = False  # ep of a generate call is over the tp ranks of one replica, which it divides
    drops_copies: bool = False  # a copy of trained weights may be given up after its call, and brought again
    dtypes: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float64")  # of weights and activations
    # of trained weights to a copy of a call's own; a call that reads the trained copy in place needs none
    transports: tuple[Transport, ...] = ("device",)
    generate_transports: tuple[Transport, ...] = ()  # to generate calls; (): as to all others
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")  # what a plan may choose
    schedules: tuple[Schedule, ...] = ("1f1b",)  # of pipeline stages
    cache_bytes: int | None = None  # of a number in the cache of a generate call; None: as in the role's dtype
    max_running: int = 1024  # sequences that decode at once on one replica
    own_devices: bool = False  # generate calls run on devices that no other call has
    records_routes: bool = False  # generate calls tell which experts each token went to
    overheads: EngineOverheads = NO_OVERHEADS  # on GPUs: on CPUs the device kind's factors were measured with them
    # as the cost functions have them, of calls that train or infer, and of those that generate; None: by the layout
    backend: Backend | None = None
    generate_backend: Backend | None = None
    # what is kept in memory, of calls that train: by a pass, recomputation and chunks aside, and of optimizer states
    passes: Running = PLAIN_PASSES
    states: StateShare = StateShare()

    def axes_of(self, *, generates: bool) -> tuple[Axis, ...]:
        """The axes of parallelism, besides dp, of a call."""
        return self.generate_axes if generates else self.axes

    def transports_to(self, call: ModelCall) -> tuple[Transport, ...]:
        """Those that bring trained weights to a call."""
        return self.generate_transports if isinstance(call, Generate) and self.generate_transports else self.transports

    def serves(self, call: ModelCall) -> bool:
        """True of a call whose experts tp cuts although they are spread: see `cuts_served_experts`."""
        return isinstance(call, Generate) and self.cuts_served_experts


# Of the embedded engines and the master, on GPUs. Host work is Python and numpy, so it is measured on the host's cores:
# decode: `ContinuousBatch.step` less the pass itself, of a model that is next to nothing, on one core: 0.37 ms and 2.0
#   to 2.3 us a sequence, for 1 to 1,024 of them.
# decode_layer, pass_layer, elementwise: what benchmarks/results/gpu_engines.json (an H200, models of 0.6B and 1.7B) has
#   beside the factors of devices.yaml: 0.055 ms a layer in steps of 64 sequences, graphs replayed (more in a
#   step of one); passes come out within 8 % at 1.7B then, and 11 to 21 % too fast at 0.6B. Norms are fused there;
#   rotary positions, gates and the losses on logits are not.
# wake: with every session the caches are given up, and the graphs of decode steps with them (`decode_graph.py`). About
#   11 are captured again (powers of two of sequences, 9, and of four of lengths), each by two eager passes of 1.1 ms a
#   layer (the same file).
# microbatch, call, sample, admission: the profile in benchmarks/results/predictions.json, of a busy machine.
# call_device: the scheduler's time a worker and call, 11 to 17 us (benchmarks/results/scheduler.json).
# step: from the end of training to the start of the next generation, in a quickstart run of 64 groups on two busy
#   cores: 18 ms, the median of 26 (12 to 33).
TORCH_OVERHEADS = EngineOverheads(
    decode_step_seconds=4.0e-4,
    decode_sequence_seconds=2.3e-6,
    decode_layer_seconds=5.5e-5,
    wake_layer_seconds=2.5e-2,
    microbatch_seconds=8.0e-4,
    pass_layer_seconds=2.2e-4,
    elementwise=2.5,
    call_seconds=9.0e-3,
    call_device_seconds=1.4e-5,
    sample_seconds=1.6e-4,
    admission_seconds=1.3e-4,
    step_seconds=1.8e-2,
)
# Host work of a decode step of a server in Python: vLLM v0.6's performance post (2024-09) finds 62 % of the step of an
# 8B model on an H100 outside the GPU's work, 0.9 ms beside the 0.6 ms that devices.yaml counts; later versions overlap
# most of it. Servers keep their devices, so they never wake. What an update over HTTP costs besides the bytes was not
# measured.
SGLANG_OVERHEADS = msgspec.structs.replace(
    TORCH_OVERHEADS,
    decode_step_seconds=9.0e-4,
    decode_sequence_seconds=1.9e-5,
    decode_layer_seconds=0.0,
    wake_layer_seconds=0.0,
)
TORCH = EngineSupport(
    overheads=TORCH_OVERHEADS,
    axes=("tp", "pp", "ep", "cp"),
    generate_axes=("tp", "pp", "ep"),
    cuts_served_experts=False,
    masks_windows=True,
    expert_copies=True,
    drops_copies=True,
    schedules=("1f1b", "interleaved"),
    records_routes=True,
)
# Generate calls on SGLang servers beside embedded engines: one for each data-parallel replica, whose tensor-parallel
# ranks share its experts: by cuts through all of them, and with ep (`--ep-size`) by sets of whole ones first.
SGLANG = msgspec.structs.replace(
    TORCH,
    name="SGLang servers",
    overheads=SGLANG_OVERHEADS,
    generate_axes=("tp", "ep"),
    masks_windows=False,
    experts_in_replica=True,
    offload=("train", "inference"),
    dtypes=("float32", "bfloat16", "float16"),
    generate_transports=("host",),  # "device": by broadcast, where the run allows it
    records_routes=False,
    own_devices=True,
)
TORCH_KIND, SGLANG_KIND = "torch", "sglang"
SUPPORT: dict[str, EngineSupport] = {TORCH_KIND: TORCH, SGLANG_KIND: SGLANG}  # kind -> support


def axes_text(axes: Sequence[Axis]) -> str:
    """`dp, tp and cp`: these axes and dp."""
    *names, last = ("dp", *axes)
    return f"{', '.join(names)} and {last}" if names else last


def run_support(generates: str = "embedded") -> EngineSupport:
    """The abilities of the engines that a run uses. generates: the engine of its generate calls, as run files name
    it."""
    return SUPPORT[SGLANG_KIND if generates == SGLANG_KIND else TORCH_KIND]
