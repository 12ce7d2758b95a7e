"""Drawing one token per running sequence: temperature, truncation, counter-based random numbers.

Owns no model and no cache. Everything is vectorised over rows, and a row's draw depends on nothing but its own logits,
settings, seed and position: neighbours, batch size and order of arrival cannot change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realgraph.runtime.engine import Request

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # the odd integer nearest 2^64 / golden ratio: SplitMix64's increment
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 40  # coarse enough that u x total < total holds in float64, fine enough for odds of 1e-12
_CHUNK_ELEMENTS = 1 << 24  # rows x vocabulary handled at once: bounds the float64 scratch at 128 MiB


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def stream(seed: int) -> int:
    """The int64 start of a seed's random stream. Mixed once, so that neighbouring seeds give unrelated streams."""
    word = (seed + _GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return _signed(word ^ (word >> 31))


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, a pure function of (stream, position): the same bits on every device.

    Both [n] int64; returns [n] float64, multiples of 2^-40. Source: SplitMix64, Steele, Lea & Flood 2014, fig. 16;
    position takes the place of its counter.
    """
    word = streams + (positions + 1) * _signed(_GAMMA)
    word = (word ^ _shift(word, 30)) * _signed(_MIX_1)
    word = (word ^ _shift(word, 27)) * _signed(_MIX_2)
    word = word ^ _shift(word, 31)
    return _shift(word, 64 - _UNIFORM_BITS).to(torch.float64) * 2.0**-_UNIFORM_BITS


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of n rows. temperature, top_p: [n] float32; top_k, streams: [n] int64.

    The flags say what any row asks for, so that the common case skips the rest: scaled (a temperature other than 1),
    greedy (temperature 0), truncated (top_k or top_p in force).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    streams: Tensor
    scaled: bool
    greedy: bool
    truncated: bool

    def rows(self, start: int, stop: int) -> "SamplingSettings":
        """The settings of rows start to stop - 1."""
        part = slice(start, stop)
        return SamplingSettings(
            self.temperature[part],
            self.top_p[part],
            self.top_k[part],
            self.streams[part],
            self.scaled,
            self.greedy,
            self.truncated,
        )


class SettingsTable:
    """The sampling settings of every slot, kept on the host; `view` gives those of the live ones as tensors."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._temperature: NDArray[np.float32] = np.ones(slots, np.float32)
        self._top_p: NDArray[np.float32] = np.ones(slots, np.float32)
        self._top_k: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._streams: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._view: tuple[int, SamplingSettings] | None = None

    def put(self, slot: int, request: Request) -> None:
        """Give `slot` the settings of `request`."""
        self._temperature[slot] = request.temperature
        self._top_p[slot] = request.top_p
        self._top_k[slot] = request.top_k
        self._streams[slot] = stream(request.seed)
        self._view = None

    def arrange(self, order: NDArray[np.int64]) -> None:
        """Slot i takes over what slot `order[i]` held, all at once."""
        for column in (self._temperature, self._top_p, self._top_k, self._streams):
            column[: len(order)] = column[order]
        self._view = None

    def view(self, n: int) -> SamplingSettings:
        """Settings of slots 0 to n - 1; made anew only after a change."""
        if self._view is None or self._view[0] != n:
            temperature, top_p, top_k = self._temperature[:n], self._top_p[:n], self._top_k[:n]
            settings = SamplingSettings(
                temperature=torch.from_numpy(temperature.copy()).to(self._device),
                top_p=torch.from_numpy(top_p.copy()).to(self._device),
                top_k=torch.from_numpy(top_k.copy()).to(self._device),
                streams=torch.from_numpy(self._streams[:n].copy()).to(self._device),
                scaled=bool((temperature != 1).any()),
                greedy=bool((temperature == 0).any()),
                truncated=bool(((top_k > 0) | (top_p < 1)).any()),
            )
            self._view = (n, settings)
        return self._view[1]


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what top-k and then top-p cut away: [n, V] in and out; top_k [n] int64, top_p [n] float32.

    top-k keeps the k largest (0: all; of equal logits the lower token first); top-p keeps, of the distribution that is
    left, the smallest set of most likely tokens whose probability reaches p, never fewer than one.
    Source: Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1, in the order of transformers' logits processors.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ranked = ranked.masked_fill(rank >= limit[:, None], -torch.inf)
    probabilities = ranked.softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    whole = (top_p >= 1)[:, None]
    ranked = ranked.masked_fill(~(whole | (before < top_p.to(torch.float64)[:, None])), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ranked)


def distribution(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Log-probabilities [n, V], in at least float32, that a row is drawn from; rows at temperature 0 come back as at
    temperature 1.

    Raises nothing: rows with NaN stay NaN, and the caller sees them in the drawn log-probability.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if settings.scaled:
        temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
        # shifted first: a small temperature would overflow large logits
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if settings.truncated:
        logits = truncate(logits, settings.top_k, settings.top_p)
    return logits.log_softmax(-1)


def _draw(logits: Tensor, settings: SamplingSettings, positions: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = distribution(logits, settings)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # the first entry whose cumulated probability exceeds the target: entries of probability 0 can't be hit
    target = uniform(settings.streams, positions)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    drawn = logprobs.gather(-1, tokens)[:, 0]
    tokens = tokens[:, 0]
    if settings.greedy:
        greedy = settings.temperature == 0
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        drawn = torch.where(greedy & ~drawn.isnan(), 0.0, drawn)
    return tokens, drawn


def draw(logits: Tensor, settings: SamplingSettings, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution it was drawn from.

    logits: [n, V], any float type (the maths is at least float32, the inverse of the cumulated probabilities float64);
    positions: [n] int64, of the tokens to draw. Returns tokens [n] int64 and log-probabilities [n], in nats.
    Temperature 0 takes the likeliest token (of equal ones the first), with log-probability 0. NaN logits give NaN.
    """
    n, vocabulary = logits.shape
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    if n <= rows:
        return _draw(logits, settings, positions)
    parts: Sequence[tuple[Tensor, Tensor]] = [
        _draw(logits[start : start + rows], settings.rows(start, start + rows), positions[start : start + rows])
        for start in range(0, n, rows)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([drawn for _, drawn in parts])
