"""Checksums of local data files, so that a resumed run draws the same samples. Data of the Hub have none."""

from collections.abc import Iterator, Mapping

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.data.row_files import data_files
from realgraph.runtime.job.job import DataSpec
from realgraph.runtime.job.manifest import FileSum, sum_files


def sums_of(spec: DataSpec | None) -> dict[str, FileSum]:
    """File -> length and checksum, of the files that a data set is read from. Raises ConfigError."""
    files = data_files(spec) if spec is not None else ()
    try:
        return dict(zip(map(str, files), sum_files(files), strict=True))
    except OSError as error:
        text = f"can't be read: {error.strerror or error}"
        raise ConfigError([Problem(Where(str(error.filename or "")), text, "", "data")]) from error


def differences(before: Mapping[str, FileSum], now: Mapping[str, FileSum]) -> Iterator[tuple[str, str]]:
    """(file, how it differs) for each that is not what it was."""
    for file in sorted({*before, *now}):
        if file not in now:
            yield file, "is gone"
        elif file not in before:
            yield file, "was not there"
        elif before[file].nbytes != now[file].nbytes:
            yield file, f"has {now[file].nbytes:,} bytes, and had {before[file].nbytes:,}"
        elif before[file] != now[file]:
            yield file, "has other bytes"
