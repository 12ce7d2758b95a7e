"""The units of memory: terms, sizes of elements, and how much of a device a plan may fill."""

from typing import Literal

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.layout import Layout
from realgraph.planner.plan.layout import Recompute as Recompute

DType = Literal["float32", "bfloat16", "float16", "float64"]
Term = Literal["weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "buckets"]
TERMS: tuple[Term, ...] = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "buckets")
ELEMENT_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# Of a machine's memory that a plan for CPUs may fill: the operating system and whatever else runs there have the rest.
# A GPU's is a plan's alone, and what allocators waste there is in the margin (`margin`).
CPU_USABLE_SHARE = 0.94
GPU_RUNTIME_BYTES = 1_500_000_000  # CUDA context, cuBLAS workspaces and one NCCL communicator of one process
# Of each further communicator: 24 channels, and on each a buffer to and from a neighbour of every protocol, of 4 MiB
# (simple), 4.7 MiB (LL128) and 0.5 MiB (LL) (NCCL 2.18, src/include/device.h and src/init.cc).
COMMUNICATOR_BYTES = 462_000_000
# Prompt tokens that enter the cache in one forward pass: vLLM's and SGLang's default on devices of 80 GB (vLLM,
# EngineArgs.max_num_batched_tokens; SGLang, chunked_prefill_size). This project's own engine takes half as many.
PREFILL_TOKENS = 8192
CACHE_PAGE_TOKENS = 16  # of one page of a KV cache
CACHE_SPARE_TOKENS = 4  # of the cache for each running sequence: admission leaves its next steps their room
CPU_RUNTIME_BYTES = 600_000_000  # a Python process with torch and transformers loaded


class Footprint(Struct, frozen=True):
    """Bytes on one device, by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    buckets: int = 0  # of messages between pipeline stages and to experts

    def __add__(self, other: "Footprint") -> "Footprint":
        return Footprint(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
            self.logits + other.logits,
            self.kv_cache + other.kv_cache,
            self.buckets + other.buckets,
        )

    @property
    def total(self) -> int:
        resident = self.weights + self.gradients + self.optimizer
        return resident + self.activations + self.logits + self.kv_cache + self.buckets

    @property
    def worst(self) -> Term:
        """The largest term."""
        return max(TERMS, key=lambda term: getattr(self, term))


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device that a plan may fill."""
    if cluster.is_cpu:
        return max(0, round(CPU_USABLE_SHARE * cluster.memory_bytes) - CPU_RUNTIME_BYTES)
    return max(0, cluster.memory_bytes - GPU_RUNTIME_BYTES)


def communicators(layout: Layout) -> Footprint:
    """Buffers of a layout's groups of GPUs: one for each axis that has several; the runtime has the first."""
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep))
    return Footprint(buckets=COMMUNICATOR_BYTES * max(0, axes - 1))


def element_bytes(dtype: DType) -> int:
    """Bytes of one element."""
    return ELEMENT_BYTES[dtype]


def master_bytes(role: ModelRole) -> int:
    """Bytes of one element of gradients, master weights and Adam moments: at least float32."""
    return 8 if "float64" in (role.dtype, role.master_dtype) else 4


def cuts_model(layout: Layout) -> bool:
    """True where the layout cuts a model, or its batches, beyond dp."""
    return layout.tp * layout.pp * layout.cp * layout.ep > 1


def distributes_states(layout: Layout) -> bool:
    """True where optimizer states are cut over the devices that hold the same parameters, which are whole in each
    (ZeRO-1, arXiv:1910.02054)."""
    return layout.sharding == "replicated" and cuts_model(layout)


def trained_expert_ranks(layout: Layout) -> int:
    """Devices of a stage over which engines that train cut routed experts: with ep each lies whole on one of ep."""
    return layout.ep if layout.ep > 1 else layout.tp


def served_expert_ranks(layout: Layout) -> int:
    """The same of engines that serve: tp cuts experts where ep does not already put fewer on each device."""
    return max(layout.ep, layout.tp)


def ceil_div(value: int, parts: int) -> int:
    """The quotient, rounded up."""
    return -(-value // parts)
