"""How the search's inner loops are compiled: with numba, once per machine; machine code is kept beside the sources."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., object])

ZERO, ONE = cast(int, np.int64(0)), cast(int, np.int64(1))  # literals would be compiled for by themselves
NONE = -1e18  # seconds of a longest path where there is no path


def _digest() -> str:
    """Of the sources of all compiled functions."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()


_STAMP = _digest()


def _compile(function: F, options: dict[str, object]) -> F:
    """A compiled function holds the code of those that it calls, but numba looks at its own file alone to see whether
    what it kept is still good. So the digest of all files takes the place of that file's time and size."""
    made: Any = cast(Any, numba.njit)(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(
        function
    )
    made._cache._cache_file._source_stamp = _STAMP
    return cast(F, made)


def compiled(function: F) -> F:
    """The function as machine code for other compiled functions: Python can't call it, which halves the compile time.

    It may allocate nothing: without counted references its arrays are the caller's.
    """
    return _compile(function, {"no_cpython_wrapper": True, "_nrt": False})


def entry(function: F) -> F:
    """The same for a function that Python calls; it releases the interpreter's lock, so that other threads go on."""
    return _compile(function, {})
