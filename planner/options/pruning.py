"""Rows of an option table that a search may need: those that no other row beats. Pure; knows no call and no device."""

import numpy as np
from msgspec import Struct

from realgraph.planner.plan.problem import Floats, Ints, OptionTable
from realgraph.planner.solve.kernels.dominance import columns_of, nondominated


class TableRows(Struct, frozen=True, eq=False):
    """A table before pruning."""

    table: OptionTable
    # seconds that moves of weights may cost more under each row than under another's layout, None where rows of
    # different layouts may replace each other freely
    slack: Floats | None = None
    edge: Floats | None = None  # seconds that moves of weights may cost less
    bonus: Ints | None = None  # bytes that other calls save where they read this row's copy in place
    beside: Ints | None = None  # what such a call needs without that, at most


def kept_rows(rows: TableRows) -> tuple[int, ...]:
    """Indices of the rows that are kept, fastest first. Of equal rows the first is.

    Row a beats row b where it is no worse in seconds, latency, resident, active (alone and shared) and host bytes.
    Under another layout it must be faster by its slack and b's edge; and hold less than b by all that sharing under b
    could save, or leave what reads beside it as much room as b takes while it runs itself.
    """
    table = rows.table
    order = np.lexsort((np.arange(len(table)), table.resident + table.active, table.latency, table.seconds))
    columns = columns_of(table, order, rows.slack, rows.edge, rows.bonus, rows.beside)
    return tuple(order[nondominated(columns, int(rows.slack is None))].tolist())
