"""The engines that keep the tokens of each other's groups. Knows no messages."""

from collections.abc import Sequence

from realgraph.runtime.wire.protocol import NOBODY

MOST_KEEPERS = 4  # of one engine's groups: those share what it had, where it is lost


def keeper_of(group: int, owner: int, engines: Sequence[int]) -> int:
    """The engine that keeps the tokens of a group that `owner` makes: one of the next ones after it; NOBODY where there
    is no other."""
    n_others = len(engines) - 1
    if n_others < 1:
        return NOBODY
    return engines[(engines.index(owner) + 1 + group % min(n_others, MOST_KEEPERS)) % len(engines)]
