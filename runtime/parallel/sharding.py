"""Parameters cut over ranks by torch's FSDP2, with gradients that are sums. CPU ranks of one host gather and sum them
through shared memory."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from realgraph.runtime.parallel.collectives.shared_memory import SharedMemory
from realgraph.runtime.parallel.groups import Ranks


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    ranks: Ranks,
    dtypes: tuple[torch.dtype, torch.dtype],
    left_out: set[nn.Parameter] | None = None,
) -> None:
    """Cut the parameters over the ranks by FSDP2, a group per layer and one for the rest.

    dtypes: of computation, and of the sharded parameters and the sums of gradients. Gradients are summed, not averaged:
    losses carry global denominators. left_out: parameters that stay as they are.
    """
    compute, master = dtypes
    policy = MixedPrecisionPolicy(param_dtype=None if compute == master else compute, reduce_dtype=master)
    mesh = ranks.mesh()
    for part in (*layers, model):
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=left_out)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if ranks.memory is not None and ranks.device.type == "cpu":
            sharded.set_custom_all_gather(_ShardGather(ranks.memory))
            sharded.set_custom_reduce_scatter(_GradientScatter(ranks.memory))


class _ShardGather(AllGather):
    """FSDP2's all-gather through shared memory."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._memory.gather(input_tensor.view(-1), output_tensor.view(self._memory.size, -1))


class _GradientScatter(ReduceScatter):
    """FSDP2's reduce-scatter through shared memory; of sums."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients of shards are summed, not reduced by {op}")
        self._memory.scatter(input_tensor.view(self._memory.size, -1), output_tensor.view(-1))
