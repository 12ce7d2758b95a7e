"""Observations of a step's passes besides their loss: entropy, and the gap to what generated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, VERSIONS
from realgraph.graphs.spec import Train
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.train.audit import Seen
from realgraph.runtime.wire.protocol import Mean


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
    """Metrics of the engine's own: entropy, and the gap to the generator on tokens that `gap_version` sampled."""
    values: dict[str, Tensor] = {}
    if outputs.entropy is not None and not outputs.entropy.requires_grad:
        values["entropy"] = outputs.entropy[batch.mask]
    if aim.gap_version is not None and outputs.logprobs is not None and BEHAVIOUR_LOGPROBS in batch.token_keys:
        present = batch.mask
        if VERSIONS in batch.token_keys:
            same = batch.token_keys[VERSIONS] == aim.gap_version
            present = present & same
            if aim.whole_samples:
                sample = batch.sample_index()
                mixed = torch.zeros(batch.n_samples, dtype=torch.bool, device=same.device)
                mixed[sample[batch.mask & ~same]] = True
                present = present & ~mixed[sample]
        values["logprob_gap"] = (outputs.logprobs.detach() - batch.token_keys[BEHAVIOUR_LOGPROBS])[present].abs()
    if not values:
        return {}
    totals = torch.stack([value.sum(dtype=torch.float64) for value in values.values()]).tolist()
    return {name: Mean(total, value.numel()) for (name, value), total in zip(values.items(), totals, strict=True)}
