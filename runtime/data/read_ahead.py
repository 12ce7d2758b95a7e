"""Rows that are probably asked for next, read and tokenised beside the device's work. No torch."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`row(index)` gives what `read(index)` does, sooner where the index was expected; a wrong guess costs its reading
    alone. Thread-safe, as `read` is to be.

    most: rows that wait to be asked for; of more, the oldest guesses are given up.
    """

    def __init__(self, read: Callable[[int], T], most: int) -> None:
        self._read, self._most = read, most
        self._changed = threading.Condition()
        self._expected: dict[int, None] = {}  # to be read, the oldest guess first
        self._ready: dict[int, T] = {}
        self._reading: int | None = None
        self._thread: threading.Thread | None = None

    def expect(self, indices: Iterable[int]) -> None:
        """Begin to read these, and go on in a thread of its own."""
        with self._changed:
            for index in indices:
                if index not in self._ready and index != self._reading:
                    self._expected[index] = None
            for rows in (self._ready, self._expected):
                for index in list(rows)[: max(0, len(self._ready) + len(self._expected) - self._most)]:
                    del rows[index]
            if self._thread is None and self._expected:
                self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def row(self, index: int) -> T:
        """The row, read now where it was not before. Raises what `read` raises."""
        with self._changed:
            self._expected.pop(index, None)
            while self._reading == index:
                self._changed.wait()
            if index in self._ready:
                return self._ready.pop(index)
        return self._read(index)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._expected:
                    self._changed.wait()
                index = next(iter(self._expected))
                del self._expected[index]
                self._reading = index
            found: dict[int, T] = {}
            with suppress(Exception):  # who asks for the row reads it again, and gets the error
                found[index] = self._read(index)
            with self._changed:
                self._reading = None
                self._ready |= found
                self._changed.notify_all()
