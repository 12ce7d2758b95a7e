"""Differences between engines of the same arithmetic: overlap, attention kernels, number formats, and where states lie.

On GPUs plain copies are those of this project's engine, which all-reduces gradients after the last micro-batch;
layouts that cut a model (tp, pp, cp, ep) are priced in the manner of Megatron-Core, with a distributed optimizer. On
CPUs a core has no overlap, and states are cut by the same rule.
"""

from functools import lru_cache
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.memory.terms import distributes_states
from realgraph.planner.plan.layout import Layout


class Backend(Struct, frozen=True, cache_hash=True):
    """An engine."""

    name: str
    compute: float = 1.0  # its time over that of bare products, attention and element-wise operations
    # of layers' matrix products, the router's aside, over those in the role's dtype: 8-bit products are faster
    product_speedup: float = 1.0
    weight_bytes: int | None = None  # of a weight that an engine serves with, None: as in the role's dtype
    cache_bytes: int | None = None  # of a number in a KV cache, None: as in the role's dtype
    # `fused` never writes scores to memory (FlashAttention, arXiv:2205.14135); `unfused` does
    attention: Literal["fused", "unfused"] = "fused"
    tp_overlap: float = 0.0  # share of tensor-parallel traffic that hides behind products
    dp_overlap: float = 0.8  # share of compute behind which gradients (and FSDP's weights) travel
    cp_overlap: float = 0.5  # share of the traffic of keys and values that hides behind attention
    p2p_overlap: float = 0.5  # share of the traffic between stages that hides
    distributed: bool = True  # optimizer states are cut over the dp copies (ZeRO-1, arXiv:1910.02054)
    gradient_bytes: int = 4  # of a summed gradient on the wire
    # read and written to add a micro-batch's gradient to the sum, where products do not do that on the way
    sum_bytes: int = 8
    sequence_parallel: bool = True  # norms and residuals are cut over tp (arXiv:2205.05198)
    step_seconds: float = 0.01  # of an optimizer step: data, gradient norm, logging
    # moved for each logit, forward and backward: fused cross-entropy reads and writes it thrice, separate operations
    # ten times
    logit_bytes: int = 20
    # gradients are all-reduced, not scattered, before a distributed optimizer gathers weights
    reduces_all: bool = False
    layer_seconds: float = 0.0  # of a layer's pass besides, where launches do not hide behind kernels
    # of traffic that could hide, the share that never does: collectives take cores and memory from the products beside
    # them
    exposed: float = 0.25
    score_bytes: int = 13  # moved for each score of unfused attention, forward
    # a token's row crosses to another node once for each of its experts there, not once for all (DeepEP)
    expert_copies: bool = False
    elementwise: float = 1.0  # bytes that element-wise operations move, over those of fused kernels


# Defaults of Megatron-Core: gradients in float32, overlapped with the last backward pass; products overlap part of
# tensor-parallel traffic (Transformer Engine's user buffers).
MEGATRON = Backend("megatron", tp_overlap=0.6, sum_bytes=0)
# FSDP copies a layer's weights out of flat buffers, and kernels wait for gathers; gathers run beside compute.
FSDP = Backend("fsdp", compute=1.08, distributed=False, dp_overlap=0.85, sum_bytes=0)
# Whole copies with an all-reduce of gradients after the last micro-batch, as this project's engine does.
REPLICATED = Backend("replicated", distributed=False, dp_overlap=0.0, sum_bytes=12)
# A core that sends or copies computes nothing meanwhile, and cores that wait have no other work.
CORES = Backend(
    "cores",
    distributed=False,
    cp_overlap=0.0,
    dp_overlap=0.0,
    p2p_overlap=0.0,
    sum_bytes=0,
    step_seconds=0.0,
)
CORES_CUT = replace(CORES, distributed=True)


@lru_cache(maxsize=1 << 14)
def backend_of(layout: Layout, cpu: bool = False) -> Backend:
    """The engine that runs a layout where none is named."""
    if cpu:
        return CORES_CUT if distributes_states(layout) else CORES
    if distributes_states(layout):
        return MEGATRON
    return REPLICATED if layout.sharding == "replicated" else FSDP
