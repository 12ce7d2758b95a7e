"""Log-probabilities and entropies of given tokens from hidden states, in chunks. Knows no model and no packing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.tensor.logprobs import cut_logprobs
from realgraph.runtime.parallel.tensor.pieces import Span

CPU_CHUNK_BYTES = 1 << 26  # of one chunk's float32 logits: about what a cache likes
GPU_CHUNK_BYTES = 1 << 29  # large enough to keep a GPU busy at a vocabulary of 150,000


@dataclass(frozen=True)
class Readout:
    """The settings by which hidden states become a distribution.

    project: [n, hidden] -> [n, vocabulary] in the model's dtype. softcap: of the logits (Gemma 2). temperature divides
    the logits after it. entropy: `no`, `detached` (a metric), or with `gradient`. cut: where ranks share the
    vocabulary, the part whose logits this rank's `project` gives; `vocabulary` is then the largest of the parts.
    """

    project: Callable[[Tensor], Tensor]
    vocabulary: int
    temperature: float = 1.0
    softcap: float | None = None
    entropy: str = "no"
    chunk_bytes: int | None = None  # of float32 logits; default by device
    cut: tuple[Span, Ranks] | None = None


def token_logprobs(hidden: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor | None]:
    """(log-probability [n] of each target, entropy [n] or None) in nats, float32 (float64 in a float64 model).

    hidden: [n, hidden]; targets: [n] int64. Memory: the logits of one chunk (forward and backward), never n x
    vocabulary; with more than one chunk the backward computes each chunk's logits again.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if targets.numel() == 0:
        # Keeps the graph: a rank without targets still takes part in the backward of a sharded model.
        nothing = readout.project(hidden).to(wide).sum(-1)
        return nothing, None if readout.entropy == "no" else nothing
    chunk_bytes = readout.chunk_bytes or (GPU_CHUNK_BYTES if hidden.is_cuda else CPU_CHUNK_BYTES)
    n = max(1, chunk_bytes // (4 * readout.vocabulary))
    if targets.numel() <= n:
        return _chunk(hidden, targets, readout)
    pieces = []
    for h, t in zip(torch.split(hidden, n), torch.split(targets, n), strict=True):
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_chunk, h, t, readout, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_chunk(h, t, readout))
    logprobs = torch.cat([logprob for logprob, _ in pieces])
    entropies = [entropy for _, entropy in pieces if entropy is not None]
    return logprobs, torch.cat(entropies) if entropies else None


def _chunk(hidden: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor | None]:
    logits = readout.project(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if readout.softcap is not None:
        logits = torch.tanh(logits / readout.softcap) * readout.softcap
    if readout.temperature != 1.0:
        logits = logits / readout.temperature
    if readout.cut is not None:
        logprobs, entropy = cut_logprobs(logits, targets, *readout.cut)
        kept = None if readout.entropy == "no" else entropy if readout.entropy == "gradient" else entropy.detach()
        return logprobs, kept
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if readout.entropy == "no":
        return logprobs, None
    if readout.entropy == "gradient":
        return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)
    with torch.no_grad():
        weights = (logits - normaliser[:, None]).exp_()
        return logprobs, normaliser - weights.mul_(logits).sum(-1)
