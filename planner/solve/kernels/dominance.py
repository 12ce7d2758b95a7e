"""Compiled: the rows of a table that no other row beats (`options/pruning.py`). Knows no call and no device."""

from typing import NamedTuple

import numpy as np

from realgraph.planner.plan.problem import OptionTable
from realgraph.planner.solve.kernels.compiled import Floats, Ints, entry

UNBOUNDED_BYTES = 1 << 60  # more bytes than there are


class Columns(NamedTuple):
    """The needs of each row, fastest first, and what its layout means to others; the arrays are as long."""

    seconds: Floats
    latency: Floats
    resident: Ints
    active: Ints
    apart: Ints  # active bytes without those that are shared with a trained copy under an equal layout
    host: Ints
    layout: Ints
    slack: Floats  # seconds that moves may cost more under this layout than under another one
    edge: Floats  # and less
    bonus: Ints  # bytes that others save by this row's copy
    beside: Ints  # what such another needs without that, at most


def columns_of(
    table: OptionTable,
    order: Ints,
    slack: Floats | None = None,
    edge: Floats | None = None,
    bonus: Ints | None = None,
    beside: Ints | None = None,
) -> Columns:
    """A table's rows in this order. slack None: no row may take the place of one under another layout."""
    n = len(order)
    return Columns(
        seconds=table.seconds[order],
        latency=table.latency[order],
        resident=table.resident[order],
        active=table.active[order],
        apart=(table.active - table.shared)[order],
        host=table.host[order],
        layout=table.layout[order],
        slack=np.full(n, np.inf) if slack is None else slack[order],
        edge=np.zeros(n) if edge is None else edge[order],
        bonus=np.zeros(n, np.int64) if bonus is None else bonus[order],
        beside=np.full(n, UNBOUNDED_BYTES) if beside is None else beside[order],
    )


@entry
def nondominated(rows: Columns, blind: int) -> Ints:
    """Places of the rows that are kept. blind: 1 where rows of different layouts may replace each other freely."""
    n = len(rows.seconds)
    kept, count = np.empty(n, np.int64), 0
    for b in range(n):
        beaten = False
        for place in range(count):
            a = kept[place]
            no_worse = (
                rows.latency[a] <= rows.latency[b]
                and rows.resident[a] <= rows.resident[b]
                and rows.host[a] <= rows.host[b]
                and rows.active[a] <= rows.active[b]
            )
            if not no_worse:
                continue
            if blind == 1 or (rows.layout[a] == rows.layout[b] and rows.apart[a] <= rows.apart[b]):
                beaten = True
                break
            later = rows.slack[a] + rows.edge[b]
            beaten = (
                rows.seconds[a] + later <= rows.seconds[b]
                and rows.latency[a] + later <= rows.latency[b]
                and rows.active[a] <= rows.apart[b]
                and (
                    rows.resident[a] + rows.bonus[b] <= rows.resident[b]
                    or rows.resident[a] + rows.beside[b] <= rows.resident[b] + rows.active[b]
                )
            )
            if beaten:
                break
        if not beaten:
            kept[count] = b
            count += 1
    return kept[:count]
