"""The messages between a pool and a process of user functions, and their form on the socket between them.

A message has a mark and its length before it: what anybody else writes to the socket is noticed at its first bytes.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from realgraph.runtime.wire.frames import body_length, cut, framed

MAX_RESULT_BYTES = 64 * 2**20
_MARK = b"\xf7rg\x01"  # never the start of text in UTF-8
_SHOWN_BYTES = 40


class ForeignBytesError(ValueError):
    """Raised where what came over the socket is no message of ours."""


class FunctionRequest(Struct, frozen=True, tag=True):
    """Run `fn` once with `kwargs`; with `probe`, only load it and see whether it takes keywords of these names."""

    number: int
    fn: str
    timeout_seconds: float
    kwargs: dict[str, Any]
    probe: bool = False


class FunctionLoaded(Struct, frozen=True, tag=True):
    """The function of call `number` is there and starts now."""

    number: int
    is_async: bool


class Returned(Struct, frozen=True, tag=True):
    """The values that call `number` returned, and the bytes that this process holds."""

    number: int
    value: Any
    seconds: float
    resident_bytes: int = 0


class Raised(Struct, frozen=True, tag=True):
    """The reason why call `number` gave nothing. load: the function can't be had or called, whatever the sample."""

    number: int
    kind: Literal["load", "error", "timeout"]
    text: str
    detail: str = ""


Answer = FunctionLoaded | Returned | Raised
_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(FunctionRequest).decode
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: FunctionRequest | Answer) -> bytes:
    """A message as it goes over the socket. Raises what msgspec does for values that have no form there."""
    return framed(_encode(message), _MARK)


def next_call(buffer: bytearray) -> FunctionRequest | None:
    """Take the first whole call out of `buffer`; None where it is not there yet. Raises ForeignBytesError."""
    body = _cut(buffer, 2**32)
    return None if body is None else _decode_call(body)


def next_answer(buffer: bytearray) -> Answer | None:
    """Take the first whole answer out of `buffer`; None where it is not there yet. Raises ForeignBytesError."""
    body = _cut(buffer, MAX_RESULT_BYTES + 4096)
    if body is None:
        return None
    try:
        return _ANSWERS.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ForeignBytesError(f"an answer that can't be read: {error}") from error


def _cut(buffer: bytearray, max_bytes: int) -> bytes | None:
    if buffer[: len(_MARK)] != _MARK[: len(buffer)]:
        raise ForeignBytesError(repr(bytes(buffer[:_SHOWN_BYTES])))
    length = body_length(buffer, _MARK)
    if length is not None and length > max_bytes:
        raise ForeignBytesError(repr(bytes(buffer[:_SHOWN_BYTES])))
    return cut(buffer, _MARK)
