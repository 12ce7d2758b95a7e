"""Refusing what others send: the errors of messages that can't be read, and a log of refusals that nobody can fill."""

import logging

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # all that decoding a message may raise
_FIRST = 10  # refusals that are logged, each; of those after them the 16th, the 32nd, and so on


class Refusals:
    """Counts what one socket refuses, and logs it ever more rarely."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self.count = log, 0

    def add(self, text: str) -> None:
        """One more. text: what was refused, and why."""
        self.count += 1
        if self.count <= _FIRST:
            self._log.warning("%s", text)
        elif self.count & (self.count - 1) == 0:
            self._log.warning("%s (the %d. such message; most are no longer logged)", text, self.count)
