"""Attention sinks around kernels that know none."""

import pytest
import torch
from torch import Tensor

from realgraph.runtime.attention.attention import ScoreShape, attend, bucketed
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sinks import Rows, SinklessKernel, beside_sinks

CPU = torch.device("cpu")
SCALE = 0.4


def written_out(n: int, heads: int, window: int | None) -> SinklessKernel:
    """Flash attention's forward and backward pass as its paper has them (arXiv:2205.14135, alg. 1 and 4), over whole
    matrices; keys and values repeated for the heads."""
    ago = torch.arange(n)[:, None] - torch.arange(n)
    seen = (ago >= 0) & (ago < (n if window is None else window))

    def parts(rows: Rows) -> tuple[Tensor, ...]:
        query, key, value = (x.transpose(0, 1) for x in rows)
        key, value = (x.repeat_interleave(heads // len(x), 0) for x in (key, value))
        scores = (query @ key.mT * SCALE).masked_fill(~seen, -torch.inf)
        return query, key, value, scores

    def forward(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        _, _, value, scores = parts(rows)
        sums = scores.logsumexp(-1)
        return ((scores - sums[..., None]).exp() @ value).transpose(0, 1), sums, torch.zeros(())

    def backward(grad: Tensor, rows: Rows, kept: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, scores = parts(rows)
        out, sums, _ = kept
        weights, upper = (scores - sums[..., None]).exp(), grad.transpose(0, 1)
        of_scores = weights * (upper @ value.mT - (grad * out).sum(-1).T[..., None]) * SCALE
        grads = of_scores @ key, of_scores.mT @ query, weights.mT @ upper
        shared = [x.unflatten(0, (rows[1].shape[1], -1)).sum(1) for x in grads[1:]]
        return grads[0].transpose(0, 1), shared[0].transpose(0, 1), shared[1].transpose(0, 1)

    return SinklessKernel(forward, backward)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_kernel_beside_sinks_gives_the_outputs_and_gradients_of_attention_with_them(
    window: int | None, kv_heads: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    n, heads = 13, 4
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)
        for shape in ((n, heads, 6), (n, kv_heads, 6), (n, kv_heads, 6), (heads,))
    ]
    query, key, value, sinks = inputs
    plain = bucketed((query, key, value), Segments([n], CPU), SCALE, ScoreShape(window, None, sinks))
    found = beside_sinks((query, key, value), sinks, written_out(n, heads, window))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    weight = torch.randn(found.shape, dtype=torch.float64, generator=draw)
    for ours, expected in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((plain * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 128])
def test_variable_length_kernels_take_sinks(window: int | None) -> None:
    lengths, gpu = [700, 3, 90, 1500, 41], torch.device("cuda")
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(lengths), n, 64, generator=draw).bfloat16() for n in (8, 2, 2)]
    sinks = torch.randn(8, generator=draw).bfloat16()
    weight = torch.randn(sum(lengths), 8, 64, generator=draw)
    results = []
    for device in (CPU, gpu):
        inputs = [x.to(device).float() if device == CPU else x.to(device) for x in (*rows, sinks)]
        query, key, value, own = (x.detach().requires_grad_() for x in inputs)
        shape = ScoreShape(window, None, own)
        out = attend((query, key, value), Segments(lengths, device), 0.1, shape)
        grads = torch.autograd.grad((out.float() * weight.to(device)).sum(), (query, key, value, own))
        results.append([x.float().cpu() for x in (out, *grads)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))
