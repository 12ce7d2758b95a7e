"""Attention sinks around a kernel that knows none: a key without a value takes its share of each query's weights.

A kernel tells of every query the log of its weights' sum. With the sink added to that sum, the kernel's own backward
pass is that of attention with sinks: weights and outputs are smaller by the sink's share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor, Tensor]


class SinklessKernel(NamedTuple):
    """Attention of rows [T, heads, dim], keys and values [T, kv_heads, dim].

    forward: outputs [T, heads, dim], log-sums of weights [heads, T] float32, and what backward wants besides. backward:
    from the gradient of outputs, the rows, and the three, the gradients of the rows.
    """

    forward: Callable[[Rows], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Rows, tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]


class _BesideSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: SinklessKernel) -> Tensor:
        out, sums, state = kernel.forward((query, key, value))
        with_sinks = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        out = out * (sums - with_sinks).exp().T[..., None].to(out.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, with_sinks, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, out, sums, state = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = ctx.kernel.backward(grad, (query, key, value), (out, sums, state))
        weights = (sinks.to(sums.dtype)[:, None] - sums).exp()  # of the sinks, [heads, T]
        of_sinks = -(weights * (grad * out).sum(-1, dtype=sums.dtype).T).sum(1)
        return (*of_rows, of_sinks.to(sinks.dtype), None)


def beside_sinks(rows: Rows, sinks: Tensor, kernel: SinklessKernel) -> Tensor:
    """[T, heads, dim]. sinks: [heads], scores of the keys without a value."""
    out: Tensor = _BesideSinks.apply(*rows, sinks, kernel)  # type: ignore[no-untyped-call]
    return out
