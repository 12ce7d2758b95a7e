"""The fate of every sampled token of an optimizer step, read off the batches that the loss was evaluated on. Pure."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from realgraph.graphs.keys import VERSIONS
from realgraph.runtime.batch import Packed
from realgraph.runtime.job.audit import NO_VERSION, AuditSample, AuditSpan

Seen = dict[int, Tensor]  # sample -> [its tokens] bool, on the CPU: the mask under which a loss has met it


def seen_of(batch: Packed) -> Seen:
    """The samples of a micro-batch, as its loss is given them."""
    return dict(zip(batch.samples, torch.split(batch.mask.cpu(), list(batch.lengths)), strict=True))


def fates(batch: Packed, minibatch: int, seen: Mapping[int, Tensor]) -> Iterator[AuditSample]:
    """Every sample of a mini-batch as it came: which of its sampled tokens the losses in `seen` have used."""
    lengths = list(batch.lengths)
    masks = torch.split(batch.mask.cpu(), lengths)
    drawn = batch.token_keys.get(VERSIONS)
    versions = torch.full_like(batch.tokens, NO_VERSION) if drawn is None else drawn
    for sample, mask, version in zip(batch.samples, masks, torch.split(versions.cpu(), lengths), strict=True):
        used = seen.get(sample, torch.zeros_like(mask))
        either = mask | used  # a token that a loss has used and no one sampled would show, too
        yield AuditSample(sample, minibatch, tuple(_spans(version[either], used[either])))


def _spans(versions: Tensor, used: Tensor) -> Iterator[AuditSpan]:
    """Runs of equal (version, used); both [n]."""
    pairs, counts = torch.unique_consecutive(torch.stack([versions, used.to(versions)]), dim=1, return_counts=True)
    for (version, part), n_tokens in zip(pairs.T.tolist(), counts.tolist(), strict=True):
        yield AuditSpan(version, n_tokens, bool(part))
