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
    worth = np.stack([table.latency, table.resident, table.host, table.active], axis=1).astype(np.float64)[
        order
    ]  # exact: bytes are fewer than 2^53
    held, kept, count = np.empty_like(worth), np.empty(n, dtype=np.int64), 0
    for place, b in enumerate(order):
        near = kept[:count][(held[:count] <= worth[place]).all(axis=1)]  # seconds are no worse either: they are sorted
        if not len(near) or not _beaten(rows, near, int(b)):
            held[count], kept[count] = worth[place], b
            count += 1
    return tuple(int(row) for row in kept[:count])


def _beaten(rows: Rows, near: npt.NDArray[np.int64], b: int) -> bool:
    """Whether one of the rows `near` beats row b; all are no worse where layouts do not matter."""
    if rows.slack is None:
        return True
    t = rows.table
    alone, shared = t.active[near], (t.active - t.shared)[near]
    equal = t.layout[near] == t.layout[b]
    if bool((equal & (shared <= t.active[b] - t.shared[b])).any()):
        return True
    bonus = 0 if rows.bonus is None else rows.bonus[b]
    beside = ELSEWHERE if rows.beside is None else rows.beside[b]
    slack = rows.slack[near] + (0.0 if rows.edge is None else rows.edge[b])
    across = (
        (t.seconds[near] + slack <= t.seconds[b])
        & (t.latency[near] + slack <= t.latency[b])
        & (alone <= t.active[b] - t.shared[b])
        & ((t.resident[near] + bonus <= t.resident[b]) | (t.resident[near] + beside <= t.resident[b] + t.active[b]))
    )
    return bool(across.any())
