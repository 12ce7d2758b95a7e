"""The kernels that `realgraph profile` times: products, attention, copies, collectives. Worker side."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from realgraph.planner.costs.calibrate.measurements import AttentionCase, Case, Collective, DeviceCopy, Gemm, HostLink
from realgraph.runtime.parallel.groups import Ranks


def kernel(case: Case, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """A function that runs the case once; its tensors are made here."""
    match case:
        case Gemm(tokens=tokens, width=width):
            x, weight = torch.randn(tokens, width, device=device), torch.randn(width, width, device=device)
            return partial(torch.mm, x.to(dtype), weight.to(dtype))
        case AttentionCase():
            return _attention(case, device, dtype)
        case DeviceCopy(nbytes=nbytes):
            source = torch.ones(nbytes // 4, device=device)
            return partial(torch.empty_like(source).copy_, source)
        case HostLink(nbytes=nbytes, to_device=to_device):
            host = torch.ones(nbytes // 4).pin_memory()
            there = torch.ones(nbytes // 4, device=device)
            return partial(there.copy_, host) if to_device else partial(host.copy_, there)
        case _:
            raise AssertionError(f"{case} is no kernel")


def _attention(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    shape = (case.samples, case.heads, case.length, case.head_dim)
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_(case.backward) for _ in range(3))

    def run() -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if case.backward:
            torch.autograd.grad(out.sum(), (query, key, value))
        return out

    return run


def collective(case: Collective, ranks: Ranks) -> Callable[[], object]:
    """The collective among `ranks`, in float32. Collective itself."""
    n = max(1, case.nbytes // 4)
    if case.op == "allreduce":
        return partial(ranks.add, torch.ones(n, device=ranks.device))
    own = torch.ones(max(1, n // ranks.size), device=ranks.device)
    whole = torch.empty(own.numel() * ranks.size, device=ranks.device)
    return partial(dist.all_gather_into_tensor, whole, own, group=ranks.group)
