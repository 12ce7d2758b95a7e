"""How the search's inner loops are compiled: with numba, once per machine; the machine code is kept beside the sources.

A compiled function holds the code of those that it calls, and numba looks at its own file alone to see whether what it
kept is still true. So the stamp of every compiled file is joined to the key of each.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

F = TypeVar("F", bound=Callable[..., object])

ZERO = np.int64(0)  # a first value whose type is that of later ones: numba compiles for the literal 0 too
NONE = -1e18  # seconds of a longest path where there is no path


def compiled(function: F) -> F:
    """The function as machine code for other compiled functions: Python can't call it, which halves the compile time.

    It may allocate nothing: without counted references its arrays are the caller's.
    """
    bare = numba.njit(
        cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False
    )
    return cast(F, bare(function))


def entry(function: F) -> F:
    """The same for a function that Python calls; it releases the interpreter's lock, so that other threads go on."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function))
