"""Packed attention against a dense mask, the chunked head against plain log-softmax, and the cut into micro-batches."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realgraph.graphs.maths import KL, Loss, PairMean, PolicyGradient, Preference, TokenMean
from realgraph.runtime.attention.attention import packed_attention
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.models.logprobs import Readout, token_logprobs
from realgraph.runtime.train.microbatch import balance, cut, idle, rejoin, units
from tests import tiny

CPU = torch.device("cpu")


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], shape: tuple[float, Any, Any]) -> Tensor:
    """Attention over one row with an explicit mask; slow and plain."""
    scaling, window, softcap = shape
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    step = torch.arange(len(sample))
    seen = (sample[:, None] == sample[None, :]) & (step[:, None] >= step[None, :])
    if window is not None:
        seen &= step[:, None] - step[None, :] < window
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("seed", range(24))
def test_packed_attention_equals_a_dense_mask(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 3, 7, 8, 9, 30]) for _ in range(rng.randint(1, 12))]
    window, softcap = rng.choice([None, 1, 4, 100]), rng.choice([None, None, 1.5])
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (2, 1)])
    draw = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(1, n, sum(lengths), 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(1, sum(lengths), heads, 8, dtype=torch.float64, generator=draw)
    found, _ = packed_attention(
        nn.Identity(),
        inputs[0],
        inputs[1],
        inputs[2],
        None,
        segments=Segments(lengths, CPU),
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
    )
    expected = dense(inputs[0], inputs[1], inputs[2], lengths, (0.3, window, softcap))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_every_token_once_and_little_padding(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 200) for _ in range(rng.randint(1, 60))]
    segments = Segments(lengths, CPU)
    n_slots = sum(rows * width for rows, width in segments.buckets)
    assert n_slots <= 1.25 * sum(lengths)
    if segments.fill is not None:
        assert segments.back is not None
        assert torch.equal(segments.fill[segments.back], torch.arange(sum(lengths)))
        assert segments.fill.numel() == n_slots


def test_attention_without_segments_is_refused() -> None:
    row = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="without `segments`"):
        packed_attention(nn.Identity(), row, row, row, None)
    with pytest.raises(ValueError, match="2 tokens, the row 3"):
        packed_attention(nn.Identity(), row, row, row, None, segments=Segments([2], CPU))


# --- the head ---------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("entropy", ["no", "detached", "gradient"])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 7, 1 << 26])
def test_chunks_change_nothing(entropy: str, chunk_bytes: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 6, dtype=torch.float64, generator=draw, requires_grad=True)
    hidden = torch.randn(33, 6, dtype=torch.float64, generator=draw, requires_grad=True)
    targets = torch.randint(50, (33,), generator=draw)
    readout = Readout(lambda h: h @ weight.T, 50, 0.7, 5.0, entropy, chunk_bytes)
    logprobs, entropies = token_logprobs(hidden, targets, readout)
    plain = (torch.tanh(hidden @ weight.T / 5.0) * 5.0 / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs, plain.gather(-1, targets[:, None])[:, 0])
    loss, expected = logprobs.sum(), plain.gather(-1, targets[:, None]).sum()
    if entropies is not None:
        torch.testing.assert_close(entropies, -(plain.exp() * plain).sum(-1))
        assert entropies.requires_grad == (entropy == "gradient")
    if entropy == "gradient" and entropies is not None:
        loss, expected = loss + entropies.sum(), expected - (plain.exp() * plain).sum()
    for a, b in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [200, 800, 3200])
def test_the_largest_tensor_does_not_grow_with_tokens_x_vocabulary(n: int) -> None:
    vocabulary, width = 1000, 4
    weight = torch.randn(vocabulary, width, requires_grad=True)
    hidden = torch.randn(n, width, requires_grad=True)
    readout = Readout(lambda h: h @ weight.T, vocabulary, entropy="gradient", chunk_bytes=4 * vocabulary * 20)
    with Largest() as largest:
        logprobs, entropy = token_logprobs(hidden, torch.zeros(n, dtype=torch.int64), readout)
        assert entropy is not None
        torch.autograd.backward((logprobs + entropy).sum())
    assert largest.elements <= max(20 * vocabulary, n * width)


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_balance_loses_nothing_keeps_the_limit_and_is_even(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 300) for _ in range(rng.randint(0, 80))]
    limit = rng.choice([None, 100, 300, 1000])
    parts = balance(sizes, limit)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    if limit is None:
        assert len(parts) <= 1
        return
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert all(load <= limit or len(part) == 1 for load, part in zip(loads, parts, strict=True))
    fitting = [load for load in loads if load <= limit]
    assert len(fitting) <= 2 * (sum(fitting) // limit + 1)  # first fit never leaves two parts half empty


@pytest.mark.parametrize("seed", range(20))
def test_rejoin_undoes_cut(seed: int) -> None:
    batch = tiny.batch(tiny.lengths(17, 40, seed), seed)
    parts = cut(batch, 50)
    pieces = [batch.select(part) for part in parts]
    tokens = rejoin(parts, [piece.tokens for piece in pieces], batch.lengths)
    assert torch.equal(torch.cat(tokens), batch.tokens)
    rewards = rejoin(parts, [piece.sample_keys["reward"] for piece in pieces], None)
    assert torch.equal(torch.cat(rewards), batch.sample_keys["reward"])


def test_pairs_are_never_cut() -> None:
    loss = Loss({"dpo": Preference()}, PairMean())
    assert loss.needs_whole_groups
    batch = tiny.batch([20, 30, 5, 5, 40, 2])
    assert units(batch, True) == [(0, 1), (2, 3), (4, 5)]
    for limit in (1, 12, 45, 60):
        for part in cut(batch, limit, whole_groups=True):
            assert all((i ^ 1) in part for i in part)


def test_idle_samples_are_those_without_any_gradient() -> None:
    batch = tiny.batch([4, 5, 6, 3])
    advantages = batch.token_keys["advantages"].clone()
    advantages[:4] = 0.0
    mask = batch.mask.clone()
    mask[9:15] = False
    changed = type(batch)(batch.tokens, batch.lengths, mask, batch.samples, batch.groups, {"advantages": advantages})
    policy = PolicyGradient()
    assert idle(Loss({"policy": policy}), changed).tolist() == [True, False, True, False]
    assert idle(Loss({"policy": policy, "kl": KL(to="ref", coef=0.0)}), changed).tolist() == [True, False, True, False]
    assert idle(Loss({"policy": policy, "kl": KL(to="ref", coef=0.1)}), changed).tolist() == [False, False, True, False]
    assert not idle(Loss({"dpo": Preference()}, PairMean()), changed).any()
    assert not idle(Loss({"policy": policy}, TokenMean()), batch).any()
