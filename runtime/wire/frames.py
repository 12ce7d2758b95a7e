"""Messages on a stream of bytes: an optional mark, the length, the body. Knows no message. Imports nothing heavy."""

LENGTH_BYTES = 4


def framed(body: bytes, mark: bytes = b"") -> bytes:
    """A body as it goes over a stream."""
    return mark + len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_length(buffer: bytes | bytearray, mark: bytes = b"") -> int | None:
    """Bytes of the first body in `buffer`, which begins with `mark`; None where its length is not there yet."""
    head = len(mark) + LENGTH_BYTES
    return None if len(buffer) < head else int.from_bytes(buffer[len(mark) : head], "big")


def cut(buffer: bytearray, mark: bytes = b"") -> bytes | None:
    """Take the first whole body out of `buffer`; None where it is not there yet."""
    length = body_length(buffer, mark)
    start = len(mark) + LENGTH_BYTES
    if length is None or len(buffer) < start + length:
        return None
    body = bytes(buffer[start : start + length])
    del buffer[: start + length]
    return body
