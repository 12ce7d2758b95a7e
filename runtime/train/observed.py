"""Observations of a step's passes besides their loss: entropy, and the gap to what generated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, VERSIONS
from realgraph.graphs.spec import Train
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.train.audit import Seen
from realgraph.runtime.wire.metrics import Mean


@dataclass(frozen=True)
class Aim:
    """The aim of one optimizer step's passes. gap_version: the weights' version where the gap to the generator
    is to be measured, else None; whole_samples: only on samples that are all of it. seen: takes what the losses are
    given, where it is audited."""

    call: Train
    loss_scale: float = 1.0
    gap_version: int | None = None
    whole_samples: bool = False
    seen: Seen | None = None


def observed(batch: Packed, outputs: Outputs, aim: Aim) -> dict[str, Mean]:
    """Metrics of the engine's own: entropy, and the gap to the generator on tokens that `gap_version` sampled; none of
    nothing, which would look like a gap of 0."""
    values: dict[str, Tensor] = {}
    if outputs.entropy is not None and not outputs.entropy.requires_grad:
        values["entropy"] = outputs.entropy[batch.mask]
    present = _measured(batch, outputs, aim)
    if present is not None and outputs.logprobs is not None:
        values["logprob_gap"] = (outputs.logprobs.detach() - batch.token_keys[BEHAVIOUR_LOGPROBS])[present].abs()
    if not values:
        return {}
    totals = torch.stack([value.sum(dtype=torch.float64) for value in values.values()]).tolist()
    pairs = zip(values.items(), totals, strict=True)
    return {name: Mean(total, value.numel()) for (name, value), total in pairs if value.numel()}


def gap_sums(batch: Packed, outputs: Outputs, aim: Aim, engines: Sequence[int]) -> Tensor:
    """[engines, 4] float64, on the CPU: of the tokens of each engine that the gap is measured on, their number and the
    sums of |drawn - recomputed|, drawn and recomputed log-probabilities. engines: workers; samples of others are left
    out."""
    sums = torch.zeros(len(engines), 4, dtype=torch.float64)
    present = _measured(batch, outputs, aim)
    if present is None or outputs.logprobs is None or not engines or not batch.engines:
        return sums
    place = {engine: i for i, engine in enumerate(engines)}
    places = torch.tensor([place.get(engine, -1) for engine in batch.engines], device=present.device)
    of_tokens = places[batch.sample_index()]
    present = present & (of_tokens >= 0)
    drawn, ours = batch.token_keys[BEHAVIOUR_LOGPROBS][present].double(), outputs.logprobs.detach()[present].double()
    rows = torch.stack([torch.ones_like(drawn), (drawn - ours).abs(), drawn, ours], dim=1)
    return sums.index_add_(0, of_tokens[present].cpu(), rows.cpu())


def _measured(batch: Packed, outputs: Outputs, aim: Aim) -> Tensor | None:
    """[T] bool: the tokens that the gap to the generator is measured on; None where it is not."""
    if aim.gap_version is None or outputs.logprobs is None or BEHAVIOUR_LOGPROBS not in batch.token_keys:
        return None
    if VERSIONS not in batch.token_keys:
        return batch.mask
    same = batch.token_keys[VERSIONS] == aim.gap_version
    present = batch.mask & same
    if aim.whole_samples:
        sample = batch.sample_index()
        mixed = torch.zeros(batch.n_samples, dtype=torch.bool, device=same.device)
        mixed[sample[batch.mask & ~same]] = True
        present = present & ~mixed[sample]
    return present
