"""Tokens that were drawn of samples which have not ended, or not been trained: what another engine goes on from."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec import Struct

TOKEN_BYTES = 4  # of a token, of its log-probability, of its version


class DrawnTokens(Struct, frozen=True, array_like=True):
    """New tokens of a sample from the `start`-th on, counted from 0: for each its log-probability under the
    distribution it was drawn from, as a sample's has in the store, and the version of the weights that drew it."""

    sample: int
    tokens: bytes  # little-endian int32
    logprobs: bytes  # little-endian float32
    versions: bytes  # little-endian int32
    start: int = 0
    ended: bool = False  # nothing more is drawn of it
    finished: bool = False  # it was ended by a stop token or string

    @property
    def n(self) -> int:
        """The number of them."""
        return len(self.tokens) // TOKEN_BYTES

    def lists(self) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probabilities and versions."""
        tokens, versions = np.frombuffer(self.tokens, "<i4"), np.frombuffer(self.versions, "<i4")
        return tokens.tolist(), np.frombuffer(self.logprobs, "<f4").tolist(), versions.tolist()

    def after(self, n: int) -> "DrawnTokens":
        """The same from the n-th new token on, of which `start` is one or comes before it."""
        at = TOKEN_BYTES * (n - self.start)
        parts = self.tokens[at:], self.logprobs[at:], self.versions[at:]
        return DrawnTokens(self.sample, *parts, n, self.ended, self.finished)

    def joined(self, more: "DrawnTokens") -> "DrawnTokens":
        """With those that follow. What does not follow on these, as something between is lost, is left out."""
        if not self.start <= more.start <= self.start + self.n:
            return self
        at = TOKEN_BYTES * (more.start - self.start)
        parts = self.tokens[:at] + more.tokens, self.logprobs[:at] + more.logprobs, self.versions[:at] + more.versions
        return DrawnTokens(self.sample, *parts, self.start, more.ended, more.finished)


def pack(
    sample: int, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], start: int = 0
) -> DrawnTokens:
    """Tokens of a sample that has not ended, from the `start`-th on."""
    packed = np.array(tokens, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes()
    return DrawnTokens(sample, *packed, np.array(versions, "<i4").tobytes(), start)


class _News(Struct, frozen=True, array_like=True):
    """The message of an engine to another one."""

    worker: int
    drawn: tuple[DrawnTokens, ...]
    over: tuple[int, ...]  # samples to forget: the sender was told to


_DECODER = msgspec.msgpack.Decoder(_News)


def encode_news(worker: int, drawn: Iterable[DrawnTokens], over: Iterable[int]) -> bytes:
    """Tokens that a worker has drawn, and samples of which no more is needed, as a message."""
    return msgspec.msgpack.encode(_News(worker, tuple(drawn), tuple(over)))


def decode_news(data: bytes) -> tuple[int, tuple[DrawnTokens, ...], tuple[int, ...]]:
    """Give back what `encode_news` was given. Raises msgspec.MsgspecError for what can't be that."""
    news = _DECODER.decode(data)
    for one in news.drawn:
        lengths = {len(one.tokens), len(one.logprobs), len(one.versions)}
        if len(lengths) > 1 or len(one.tokens) % TOKEN_BYTES or one.start < 0:
            raise msgspec.ValidationError(f"sample {one.sample}: {sorted(lengths)} bytes from token {one.start} on")
    return news.worker, news.drawn, news.over
