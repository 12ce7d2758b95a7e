"""The kernels that `realgraph profile` times: products, attention, copies, collectives. Worker side."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from realgraph.planner.costs.calibrate.measurements import AttentionCase, Collective, DeviceCopy, Gemm, HostLink
from realgraph.runtime.parallel.groups import Ranks

KernelCase = Gemm | AttentionCase | DeviceCopy | HostLink


def kernel(case: KernelCase, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
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
    rows = max(1, case.nbytes // 4 // ranks.size)
    whole = torch.ones(rows * ranks.size, device=ranks.device)
    match case.op:
        case "allreduce":
            return partial(ranks.add, whole)
        case "gather":
            return partial(ranks.gather_rows, whole[:rows])
        case "scatter":
            return partial(ranks.scatter_rows, whole)
        case "exchange":
            return partial(ranks.exchange_rows, whole, [rows] * ranks.size, [rows] * ranks.size)
        case "p2p":
            return partial(_there_and_back, whole, ranks)


def _there_and_back(message: Tensor, ranks: Ranks) -> None:
    """From the first of two ranks to the second, and back."""
    if ranks.rank == 0:
        dist.send(message, group=ranks.group, group_dst=1)
        dist.recv(message, group=ranks.group, group_src=1)
    else:
        dist.recv(message, group=ranks.group, group_src=0)
        dist.send(message, group=ranks.group, group_dst=0)
