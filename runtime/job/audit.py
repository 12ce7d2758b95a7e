"""The record of what every loss has used, as the trainer writes it: `audit/worker-N.jsonl` of a run. Plain data.

Nothing here knows a bound: whoever reads the record judges it.
"""

from msgspec import Struct

NO_VERSION = -1  # of tokens that no version of the weights has drawn, or of a loss that reads no versions


class AuditSpan(Struct, frozen=True, array_like=True):
    """Neighbouring sampled tokens of one version that met one fate."""

    version: int  # of the weights that drew them: completed train calls of their role
    n_tokens: int
    used: bool  # they had a part in the loss; else they were left out, with their sample or alone


class AuditSample(Struct, frozen=True, array_like=True):
    """A sample in one optimizer step."""

    sample: int
    minibatch: int  # counted over all epochs of the call
    spans: tuple[AuditSpan, ...]  # in the order of the tokens


Audit = list[AuditSample]


class AuditRecord(Struct, frozen=True):
    """One train call of a step, as one data-parallel rank made it."""

    call: str
    step: int
    version: int  # of the weights that the call trains
    worker: int
    time: float  # Unix seconds, when the call had ended
    samples: tuple[AuditSample, ...]
