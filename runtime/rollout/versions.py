"""The weight versions that one server's tokens may carry. Pure bookkeeping: knows no socket and no weights.

Versions are the run's own numbers, which grow by every update; a server gives them back as text.
"""

from collections.abc import Sequence

from msgspec import Struct


class VersionSpan(Struct, frozen=True):
    """Tokens start..end-1 of an answer were drawn under `version`."""

    version: int
    start: int
    end: int


class VersionLog:
    """The versions that a server was given, in order. Written by one client."""

    def __init__(self, first: int) -> None:
        self._given = [first]
        self._confirmed = first

    @property
    def confirmed(self) -> int:
        """The version of the last update that the server has said it has made."""
        return self._confirmed

    @property
    def newest(self) -> int:
        """The version of the last update that has begun."""
        return self._given[-1]

    def begin(self, version: int) -> None:
        """An update to `version` is on its way: from here on tokens may carry it. It may be tried again."""
        if version < self.newest or (version == self.newest and version == self._confirmed):
            raise ValueError(f"weights {version} after weights {self.newest}: every update needs a number of its own")
        if version != self.newest:
            self._given.append(version)

    def confirm(self, version: int) -> None:
        """The server has `version` now."""
        assert version == self.newest
        self._confirmed = version

    def fault(self, spans: Sequence[VersionSpan], since: int) -> str:
        """The fault of an answer's spans, '' where there is none. since: `confirmed` when the request was sent."""
        given = [version for version in self._given if version >= since]
        named = [span.version for span in spans]
        if unknown := [version for version in named if version not in given]:
            return f"tokens of weights {unknown[0]}, where only {', '.join(map(str, given))} can be"
        if named != sorted(named):
            return f"weights {named} in this order"
        return ""


def span_of_one(since: int, log: VersionLog, version: str, n_tokens: int) -> tuple[VersionSpan, ...] | None:
    """All tokens under one version, where the server names only that of the last token (before 0.5.20).

    None where an update began since the request was sent: earlier tokens may be of older weights.
    """
    if since != log.newest or version != str(since):
        return None
    return (VersionSpan(since, 0, n_tokens),) if n_tokens else ()
