"""Compilation of the search's inner loops: with numba, once per machine; machine code is kept beside the sources."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import config

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

F = TypeVar("F", bound=Callable[..., object])
Kept = dict[object, str]  # numba's index of one function: signatures and files of machine code

ZERO, ONE = cast(int, np.int64(0)), cast(int, np.int64(1))  # literals would be compiled for by themselves
NO_PATH_SECONDS = -1e18  # seconds of a longest path where there is no path
COMPILED = (b"njit", b"@compiled", b"@entry", b"(NamedTuple)")  # what a source has that compiled code hangs on


def _digest() -> str:
    """Digest of the sources of all compiled functions, and of the tuples that they take."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.sha256(b"".join(text for text in texts if any(word in text for word in COMPILED))).hexdigest()


_STAMP = _digest()


def _compile(function: F, options: dict[str, object]) -> F:
    """A compiled function holds the code of those that it calls, but numba looks at its own file alone to see whether
    what it kept is still good. So the digest of all files takes the place of that file's time and size."""
    made: Any = cast(Any, numba.njit)(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(
        function
    )
    made._cache._cache_file._source_stamp = _STAMP
    made._cache._cache_file._load_index = _or_nothing(made._cache._cache_file._load_index)
    return cast(F, made)


def _or_nothing(load_index: Callable[[], Kept]) -> Callable[[], Kept]:
    """numba reads all of an index before it compares the stamp: an old one may name tuples that have another name now,
    and keeps nothing of use then."""

    def load() -> Kept:
        try:
            return load_index()
        except (AttributeError, ImportError):
            return {}

    return load


@contextmanager
def fast_compile() -> Iterator[None]:
    """Compiles what is inside in a third less time; it runs a twelfth slower: for vectors there is no
    use in loops over a few tasks."""
    settings: Any = config
    kept = settings.OPT, settings.LOOP_VECTORIZE, settings.SLP_VECTORIZE
    settings.OPT, settings.LOOP_VECTORIZE, settings.SLP_VECTORIZE = type(settings.OPT)(1), 0, 0
    try:
        yield
    finally:
        settings.OPT, settings.LOOP_VECTORIZE, settings.SLP_VECTORIZE = kept


def compiled(function: F) -> F:
    """The function as machine code for other compiled functions: Python can't call it, which halves the compile time.

    It may allocate nothing: without counted references its arrays are the caller's.
    """
    return _compile(function, {"no_cpython_wrapper": True, "_nrt": False})


def entry(function: F) -> F:
    """The same for a function that Python calls; it releases the interpreter's lock, so that other threads go on."""
    return _compile(function, {})
