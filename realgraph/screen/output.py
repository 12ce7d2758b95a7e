"""The one way to the user's screen: plain text with every control character shown, and streams that may fail.

Text from data, models, files and exceptions may hold escape codes that would write over the terminal; what is printed
here, and by the console of `terminal.py`, shows them as `\\x1b`. Imports nothing heavy.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec

UNWRITABLE = 1  # exit code: the output could not be written
_CONTROL = (*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
_DIRECTION = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they reorder what stands round
_BREAKS = (0x2028, 0x2029)
_SHOWN = {
    **{code: f"\\x{code:02x}" for code in _CONTROL},
    **{code: f"\\u{code:04x}" for code in (*_DIRECTION, *_BREAKS, *range(0xD800, 0xE000))},
}
_JSON = {code: f"\\u{code:04x}" for code in _SHOWN}


def visible(text: str) -> str:
    """The text with control characters, changes of direction and lone surrogates as escapes; lines and tabs stay."""
    return text if text.isprintable() else text.translate(_SHOWN)


def say(text: object, err: bool = False, end: str = "\n") -> None:
    """Print for a person: to stderr where `err`."""
    stream = sys.stderr if err else sys.stdout
    stream.write(visible(str(text)) + end)
    stream.flush()


def say_warnings(warnings: Iterable[object]) -> None:
    """Each on standard error, with its place and its hint, as problems are."""
    for warning in warnings:
        say(f"warning: {warning}", err=True)


def say_json(value: object) -> None:
    """Print a value as indented JSON."""
    say_json_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say_json_text(text: str) -> None:
    """Print what is JSON already: what JSON leaves as it is and a terminal does not is escaped in JSON's way."""
    sys.stdout.write((text if text.isprintable() else text.translate(_JSON)).rstrip("\n") + "\n")


class OutputError(Exception):
    """Standard output does not take what is written to it."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.gone = cause.errno == errno.EPIPE  # its reader has ended, as `head` does


class WatchedStream:
    """A text stream whose failures go to `on_failure`; anything else is the stream's own."""

    def __init__(self, inner: TextIO, on_failure: Callable[[OSError], None]) -> None:
        self.inner, self._on_failure = inner, on_failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, text: str) -> int:
        """As the stream does; a failure goes to `on_failure`."""
        try:
            return self.inner.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """As the stream does; a failure goes to `on_failure`."""
        try:
            self.inner.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Send what the stream still holds somewhere, or Python fails when it flushes at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.inner.fileno())
        os.close(null)
        self._on_failure(error)


def forgiving_stdout() -> TextIO:
    """Standard output for a run, which goes on where nobody takes what it shows: that is lost, and said on stderr."""
    inner = sys.stdout.inner if isinstance(sys.stdout, WatchedStream) else sys.stdout
    return WatchedStream(inner, _lost)  # type: ignore[return-value]


def _lost(error: OSError) -> None:
    if error.errno != errno.EPIPE:
        reason = error.strerror or str(error)
        say(f"warning: standard output can't be written to ({reason}): the run goes on without it", err=True)


@contextmanager
def standard_streams() -> Iterator[None]:
    """stdout and stderr that show any character; where stdout fails, exits with 1: quietly if its reader has ended.

    Where stderr fails too, only the exit code is left to report it.
    """
    _fill_closed()
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out = WatchedStream(before[0] or _nowhere(), _raise)
    sys.stdout = out
    sys.stderr = WatchedStream(before[1] or _nowhere(), lambda error: None)
    try:
        try:
            yield
        finally:
            out.flush()
    except OutputError as error:
        if not error.gone:
            say(f"standard output: can't be written to: {error}", err=True)
        sys.exit(UNWRITABLE)
    finally:
        sys.stdout, sys.stderr = before


def _fill_closed() -> None:
    """Descriptors 0 to 2 of those streams that were closed before the process began: they lead nowhere.

    Else the next file or socket would get their number, and a child would take it for its own stream, or have none.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def _nowhere() -> TextIO:
    """A stream that drops all, in place of one that was closed before the process began."""
    return open(os.devnull, "w", encoding="utf-8")


def _raise(error: OSError) -> None:
    raise OutputError(error) from error
