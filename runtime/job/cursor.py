"""The data row of a prompt group and the shuffle of a batch: pure in their arguments, the same on every machine.

Only the raw Philox bit stream is used, which numpy keeps stable over its versions (its `permutation` is not).
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROWS, _BATCH = 1, 2  # separate the streams of the two uses of one seed


def _order(n: int, *entropy: int) -> NDArray[np.int64]:
    """A permutation of range(n) that depends on nothing but `entropy`."""
    stream = np.random.Philox(np.random.SeedSequence([value % 2**64 for value in entropy]))
    order = np.argsort(stream.random_raw(n), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=4)
def permutation(n_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """[n_rows] int64, read-only: the order in which `epoch` visits the data rows."""
    return _order(n_rows, _ROWS, seed, epoch)


def row_of(group: int, n_rows: int, seed: int, shuffle: bool) -> int:
    """The data row of prompt group number `group`: every row once in each pass over the data."""
    if n_rows < 1:
        raise ValueError("the data set has no rows")
    epoch, position = divmod(group, n_rows)
    return int(permutation(n_rows, seed, epoch)[position]) if shuffle else position


def minibatch_groups(n_groups: int, n_minibatches: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Positions of a batch's groups, shuffled and cut into equal parts (at most one group apart), each in order."""
    if n_minibatches == 1:
        return [list(range(n_groups))]
    parts = np.array_split(_order(n_groups, _BATCH, seed, step, epoch), n_minibatches)
    return [sorted(part.tolist()) for part in parts]
