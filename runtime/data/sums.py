"""Checksums of local data files, so that a resumed run draws the same samples, and of frozen models, which no
checkpoint has. Data and models of the Hub have none."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Train
from realgraph.runtime.data.data import model_source
from realgraph.runtime.data.row_files import data_files
from realgraph.runtime.job.job import DataSpec
from realgraph.runtime.job.manifest import FileSum, sum_files, sum_sampled


def sums_of(spec: DataSpec | None) -> dict[str, FileSum]:
    """File -> length and checksum, of the files that a data set is read from. Raises ConfigError."""
    files = data_files(spec) if spec is not None else ()
    try:
        return dict(zip(map(str, files), sum_files(files), strict=True))
    except OSError as error:
        text = f"can't be read: {error.strerror or error}"
        raise ConfigError([Problem(Where(str(error.filename or "")), text, "", "data")]) from error


def sums_of_frozen(graph: Graph) -> dict[str, dict[str, FileSum]]:
    """Role -> file -> length and checksum of samples, of the weights of local models that are never trained. Raises
    ConfigError."""
    trained = {call.model for call in graph.calls.values() if isinstance(call, Train)}
    frozen = [name for name, role in graph.models.items() if name not in trained and role.ema_rate is None]
    folders = {name: Path(model_source(graph, name)[0]) for name in frozen}
    found = {name: sorted(path.glob("*.safetensors")) for name, path in folders.items() if path.is_absolute()}
    return {name: sampled_sums(files) for name, files in found.items() if files}


def sampled_sums(files: Iterable[Path]) -> dict[str, FileSum]:
    """File -> length and checksum of samples. Raises ConfigError."""
    try:
        return {str(file): sum_sampled(file) for file in files}
    except OSError as error:
        text = f"can't be read: {error.strerror or error}"
        raise ConfigError([Problem(Where(str(error.filename or "")), text, "", "model")]) from error


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
