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
USABLE_FRACTION = 0.94  # of a device's memory that a plan may use: allocators fragment
GPU_RUNTIME_BYTES = 1_500_000_000  # CUDA context, NCCL and cuBLAS workspaces of one process
# Prompt tokens that enter the cache in one forward pass: vLLM's and SGLang's default on devices of 80 GB (vLLM,
# EngineArgs.max_num_batched_tokens; SGLang, chunked_prefill_size). This project's own engine takes half as many.
PREFILL_TOKENS = 8192
CACHE_PAGE_TOKENS = 16  # of one page of a KV cache
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
    runtime = CPU_RUNTIME_BYTES if cluster.is_cpu else GPU_RUNTIME_BYTES
    return max(0, round(USABLE_FRACTION * cluster.memory_bytes) - runtime)


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
