"""Packed (padding-free) batches: what engines, losses and advantages work on. Worker side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """N samples laid end to end in T tokens.

    tokens: [T] int64. lengths: N ints that sum to T. mask: [T] bool, true where the policy sampled (or SFT trains).
    token_keys: name -> [T]; sample_keys: name -> [N] (group keys are repeated per sample). samples: N ids;
    groups: N ints, samples with equal numbers are one prompt group. engines: the workers that generated the N samples.
    Entry t of a token key is about token t given the tokens of its sample before it; entry 0 of a sample is 0 for
    log-probabilities. Of samples, groups and engines there may be none.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    mask: Tensor
    samples: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    token_keys: Mapping[str, Tensor] = field(default_factory=dict)
    sample_keys: Mapping[str, Tensor] = field(default_factory=dict)
    engines: tuple[int, ...] = ()

    @property
    def n_samples(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    def positions(self) -> Tensor:
        """[T] int64: 0, 1, ... within each sample."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return (torch.arange(len(starts)) - starts).to(self.tokens.device)

    def sample_index(self) -> Tensor:
        """[T] int64: which sample (0 ... N-1) each token belongs to."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.tokens.device)
        return torch.repeat_interleave(torch.arange(self.n_samples, device=self.tokens.device), lengths)

    def key(self, name: str) -> Tensor:
        """A key at token level [T]: sample keys are repeated over their tokens. Raises KeyError."""
        if name in self.token_keys:
            return self.token_keys[name]
        return self.sample_keys[name][self.sample_index()]

    def select(self, indices: Sequence[int]) -> "Packed":
        """The samples at these positions, in this order."""
        if list(indices) == list(range(self.n_samples)):
            return self
        lengths = list(self.lengths)
        token_pieces = {name: torch.split(value, lengths) for name, value in self.token_keys.items()}
        tokens, mask = torch.split(self.tokens, lengths), torch.split(self.mask, lengths)
        rows = torch.tensor(list(indices), dtype=torch.int64, device=self.tokens.device)
        empty = not indices
        return Packed(
            tokens=self.tokens[:0] if empty else torch.cat([tokens[i] for i in indices]),
            lengths=tuple(self.lengths[i] for i in indices),
            mask=self.mask[:0] if empty else torch.cat([mask[i] for i in indices]),
            samples=tuple(self.samples[i] for i in indices) if self.samples else (),
            groups=tuple(self.groups[i] for i in indices) if self.groups else (),
            token_keys={
                n: self.token_keys[n][:0] if empty else torch.cat([p[i] for i in indices])
                for n, p in token_pieces.items()
            },
            sample_keys={name: value[rows] for name, value in self.sample_keys.items()},
            engines=tuple(self.engines[i] for i in indices) if self.engines else (),
        )

    def to(self, device: torch.device) -> "Packed":
        """The same batch on another device."""
        return Packed(
            self.tokens.to(device),
            self.lengths,
            self.mask.to(device),
            self.samples,
            self.groups,
            {name: value.to(device) for name, value in self.token_keys.items()},
            {name: value.to(device) for name, value in self.sample_keys.items()},
            self.engines,
        )


@dataclass(frozen=True)
class Outputs:
    """The outputs of a role's forward pass for a loss: float32 (float64 in a float64 model), with gradient where
    trained.

    logprobs: [T]. entropy: [T], where asked for. values: [T] of a value head: entry t is the value of the state before
    token t. scores: [N], the score head at each sample's last token. balance: a scalar, the load-balancing loss of a
    mixture of experts, where asked for; expert_load: its assignments, without gradient (`RoutingRecord.load`).
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    balance: Tensor | None = None
    expert_load: Tensor | None = None
