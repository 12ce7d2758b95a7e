"""Which rows of an option table a search may need: those that no other row beats. Pure; knows no call and no device."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.problem import Floats, Ints, OptionTable

ELSEWHERE = 1 << 60  # more bytes than there are


class Rows(Struct, frozen=True, eq=False):
    """A table before pruning. slack: seconds that moves of weights may cost more under each row than under another's
    layout, None where rows of different layouts may replace each other freely. edge: seconds that they may cost less.
    bonus: bytes that other calls save where they read this row's copy in place; beside: what such a call needs without
    that, at most.
    """

    table: OptionTable
    slack: Floats | None = None
    edge: Floats | None = None
    bonus: Ints | None = None
    beside: Ints | None = None


def kept_rows(rows: Rows) -> tuple[int, ...]:
    """Indices of the rows that are kept, fastest first. Of equal rows the first is.

    Row a beats row b where it is no worse in seconds, latency, resident, active (alone and shared) and host bytes.
    Under another layout it must be faster by its slack and b's edge; and hold less than b by all that sharing under b
    could save, or leave what reads beside it as much room as b takes while it runs itself.
    """
    table, n = rows.table, len(rows.table)
    if n == 0:
        return ()
    order = np.lexsort((np.arange(n), table.resident + table.active, table.latency, table.seconds))
    kept: list[int] = []
    for b in order:
        if not kept or not _beaten(rows, np.array(kept), int(b)):
            kept.append(int(b))
    return tuple(kept)


def _beaten(rows: Rows, kept: npt.NDArray[np.int64], b: int) -> bool:
    """Whether one of the kept rows beats row b."""
    t = rows.table
    alone, shared = t.active[kept], (t.active - t.shared)[kept]
    same = (
        (t.seconds[kept] <= t.seconds[b])
        & (t.latency[kept] <= t.latency[b])
        & (t.resident[kept] <= t.resident[b])
        & (t.host[kept] <= t.host[b])
        & (alone <= t.active[b])
    )
    if not same.any():
        return False
    equal = t.layout[kept] == t.layout[b]
    if rows.slack is None:
        return bool(same.any())
    if bool((same & equal & (shared <= t.active[b] - t.shared[b])).any()):
        return True
    bonus = 0 if rows.bonus is None else rows.bonus[b]
    beside = ELSEWHERE if rows.beside is None else rows.beside[b]
    slack = rows.slack[kept] + (0.0 if rows.edge is None else rows.edge[b])
    across = (
        (t.seconds[kept] + slack <= t.seconds[b])
        & (t.latency[kept] + slack <= t.latency[b])
        & (alone <= t.active[b] - t.shared[b])
        & ((t.resident[kept] + bonus <= t.resident[b]) | (t.resident[kept] + beside <= t.resident[b] + t.active[b]))
    )
    return bool((same & across).any())
