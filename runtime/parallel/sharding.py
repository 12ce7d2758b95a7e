"""Parameters cut over ranks by torch's FSDP2, with gradients that are sums."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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
