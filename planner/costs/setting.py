"""The common ground of all cost formulas: the setting of a call, arithmetic rates and their efficiency. Per device
throughout.

What a run measures replaces these guesses, never the other way.
"""

from msgspec import Struct

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.backend import Backend, backend_of
from realgraph.planner.costs.memory.memory import DType, element_bytes
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import Layout


class Setting(Struct, frozen=True, cache_hash=True):
    """One role under one layout on a cluster: what every cost depends on."""

    model: ModelSpec
    role: ModelRole
    layout: Layout
    cluster: Cluster
    factors: EfficiencyFactors | None = None  # measured ones that replace those of the cluster's kind
    backend: Backend | None = None  # the engine that runs it; None: the one for such a layout
    cuts_served_experts: bool = True  # of a decode step: see `EngineSupport`
    masks_windows: bool = False  # passes compute what windows hide, and decode steps read it

    @property
    def engine(self) -> Backend:
        """The backend that runs it."""
        return self.backend or backend_of(self.layout, self.cluster.is_cpu)

    @property
    def costs(self) -> EfficiencyFactors:
        return self.factors or device_kind(self.cluster.kind).costs

    @property
    def element(self) -> int:
        """Bytes of one weight."""
        return element_bytes(self.role.dtype)

    @property
    def flops(self) -> float:
        """Peak operations per second of one device in the role's dtype."""
        return self.cluster.flops * dtype_rate(self.role.dtype, self.cluster.is_cpu)


def dtype_rate(dtype: DType, cpu: bool) -> float:
    """Arithmetic rate relative to the cluster's `flops` (bf16 on a GPU, fp32 on a CPU).

    GPU: tensor cores in TF32 at half the bf16 rate, fp64 at 1/15 (NVIDIA A100 and H100 data sheets). CPU: AVX-512 with
    bf16 units, measured.
    """
    if cpu:
        return {"float32": 1.0, "bfloat16": 2.0, "float16": 0.5, "float64": 0.5}[dtype]
    return {"float32": 0.5, "bfloat16": 1.0, "float16": 1.0, "float64": 1 / 15}[dtype]


def gemm_efficiency(costs: EfficiencyFactors, tokens: float, width: float) -> float:
    """Reached fraction of the peak for a product of `tokens` rows over the smaller of the layer's widths."""
    return costs.gemm * tokens / (tokens + costs.gemm_tokens) * width / (width + costs.gemm_width)
