"""Which rows of an option table a search may need: those that no other row beats. Pure; knows no call and no device."""

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from realgraph.planner.problem import Floats, Ints, OptionTable
from realgraph.planner.solve.dominance import Columns, unbeaten

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
    order = np.lexsort((np.arange(n), table.resident + table.active, table.latency, table.seconds))

    def column(values: npt.NDArray[Any] | None, default: float) -> npt.NDArray[Any]:
        return np.full(n, default) if values is None else values[order]

    columns = Columns(
        seconds=table.seconds[order],
        latency=table.latency[order],
        resident=table.resident[order],
        active=table.active[order],
        apart=(table.active - table.shared)[order],
        host=table.host[order],
        layout=table.layout[order],
        slack=column(rows.slack, 0.0),
        edge=column(rows.edge, 0.0),
        bonus=column(rows.bonus, 0).astype(np.int64),
        beside=column(rows.beside, ELSEWHERE).astype(np.int64),
    )
    return tuple(order[unbeaten(columns, int(rows.slack is None))].tolist())
