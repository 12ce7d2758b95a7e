"""Checksums of files: of a checkpoint, written as its last file and compared before anything goes on from it.

They find damage, not forgery: XXH3 with 128 bits reads at the speed of memory (10 GB/s on a core, where BLAKE2b makes
0.4), so that reading the files is all that a comparison costs. Knows no tensors and no state.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from realgraph.runtime.job.run_folder import write_atomic

MANIFEST = "manifest.json"
FORMAT = 1  # version of Manifest
CHUNK_BYTES = 1 << 22
SAMPLE_BYTES = 1 << 20  # at each place of a file of weights
_THREADS = min(8, os.cpu_count() or 1)  # files at once; hashing and reading release the interpreter's lock

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class FileSum(Struct, frozen=True, forbid_unknown_fields=True):
    """A file's length and the XXH3-128 of its bytes, in hexadecimal."""

    nbytes: int
    xxh3: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Every file of a folder by its path inside, itself left out."""

    files: dict[str, FileSum]
    format: int = FORMAT


def sum_file(path: Path) -> FileSum:
    """Read a file once, in pieces. Raises OSError."""
    import xxhash  # late: `check` and `plan` need none

    digest, nbytes, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
            nbytes += n
    return FileSum(nbytes, digest.hexdigest())


def sum_sampled(path: Path) -> FileSum:
    """A file's length, and a checksum of its beginning, its middle and its end: weights that were trained on differ
    there, and a file of any size takes milliseconds. Raises OSError."""
    import xxhash  # late, as above

    digest, nbytes = xxhash.xxh3_128(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for start in (0, max(0, nbytes // 2 - SAMPLE_BYTES // 2), max(0, nbytes - SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return FileSum(nbytes, digest.hexdigest())


def sum_files(paths: Sequence[Path]) -> list[FileSum]:
    """Checksums of several files, some at once where they are large. Raises OSError."""
    return _map(sum_file, paths, sum(path.stat().st_size for path in paths))


def _map(function: Callable[[_Item], _Result], items: Sequence[_Item], nbytes: int) -> list[_Result]:
    """Apply a function to all items, in threads where there are enough bytes to read."""
    if nbytes < CHUNK_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, items))


def seal(folder: Path) -> None:
    """Write the manifest of a folder whose other files are all written and synced. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = [path.relative_to(folder).as_posix() for path in files]
    manifest = Manifest(dict(zip(names, sum_files(files), strict=True)))
    write_atomic(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def damage(folder: Path, inside: str = "", but: str = "\0") -> str:
    """The first file that is not what was written, and how; '' where all are.

    inside, but: beginnings of the paths inside to look at, and of those to leave out.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return f"{MANIFEST}, which has the checksums of its files, is missing"
    except OSError as error:
        return f"{MANIFEST} can't be read: {error.strerror or error}"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return f"{MANIFEST} is no list of checksums"
    if manifest.format != FORMAT:
        return f"{MANIFEST} has format {manifest.format}, this version reads {FORMAT}"
    names = [name for name in manifest.files if name.startswith(inside) and not name.startswith(but)]
    wanted = {name: manifest.files[name] for name in names}
    nbytes = sum(file.nbytes for file in wanted.values())
    reasons = _map(lambda name: _difference(folder / name, name, wanted[name]), tuple(wanted), nbytes)
    return next(filter(None, reasons), "")


def _difference(path: Path, name: str, written: FileSum) -> str:
    try:
        nbytes = path.stat().st_size
        if nbytes != written.nbytes:
            return f"{name} has {nbytes:,} bytes, {written.nbytes:,} were written"
        return "" if sum_file(path) == written else f"{name} is not what was written: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in a damaged manifest
        return f"{name} can't be read: {getattr(error, 'strerror', None) or error}"
