"""Rows of a data set by number, wherever they lie: JSON lines, CSV, parquet, or on the Hub. Knows no tokens."""

import glob
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from realgraph.graphs.errors import ConfigError, Where
from realgraph.runtime.data import hub
from realgraph.runtime.data.columns import column_names, schema_names
from realgraph.runtime.data.row_content import (
    COMPRESSED,
    FORMS,
    Content,
    csv_header,
    csv_records,
    form_of,
    json_row,
    problem,
)
from realgraph.runtime.job.job import DataSpec

SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
CACHED_BYTES = 512 * 2**20  # of decoded parquet row groups

RawRow = dict[str, Any]


class RowReader(Protocol):
    """Rows by number. Reading is thread-safe."""

    columns: tuple[str, ...]
    all_text: bool  # every value is a text, whatever it stands for (CSV has no types)

    def __len__(self) -> int: ...

    def read(self, index: int) -> RawRow:
        """Raises ConfigError naming the place of a row that can't be read."""
        ...

    def where(self, index: int) -> Where:
        """The place of a row in the user's files."""
        ...


def open_rows(spec: DataSpec) -> RowReader:
    """The rows that `spec` names, its first `limit`. Raises ConfigError for what is missing, empty or unreadable."""
    files = data_files(spec)
    rows: RowReader
    if not files:
        rows = HubRows(spec)
    else:
        form = form_of(files[0])
        kind = ParquetRows if form == "parquet" else CsvRows if form == "CSV" else JsonRows
        rows = kind(files, spec.limit)
    if not len(rows):
        raise problem(Where(spec.path), "the data set has no rows")
    return rows


def files_at(path: str) -> list[Path]:
    """The files that a path names, of any split, sorted; none where it names none, such as a Hub id."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    files = [Path(name) for name in sorted(glob.glob(str(place / "*") if place.is_dir() else str(place)))]
    return [file for file in files if form_of(file) and file.is_file()]


def lacks_split(spec: DataSpec, split: str) -> bool:
    """True of files that have no such split: those of no folder, or of one that names others."""
    if not files_at(spec.path):
        return False
    try:
        data_files(replace(spec, split=split))
    except ConfigError:
        return True
    return False


def data_files(spec: DataSpec) -> tuple[Path, ...]:
    """The files that `spec.path` names, sorted; none for a Hub id. Raises ConfigError.

    In a folder whose files are named by split (`train.jsonl`, `test-00000.parquet`) only those of `spec.split` count; a
    single file or a glob is the training split, whatever its name.
    """
    place, files = Path(spec.path).expanduser(), files_at(spec.path)
    if place.is_dir():
        _refuse_saved(place, spec)
        if not files:
            inside = [child for child in sorted(place.iterdir()) if child.is_dir() and files_at(str(child))]
            inside.sort(key=lambda child: child.name != spec.split)
            hint = f"its folder {inside[0].name} does: name {Path(spec.path) / inside[0].name}" if inside else ""
            raise problem(Where(spec.path), f"the folder holds no {', '.join(FORMS)} file", hint)
        named = [file for file in files if _split_of(file)]
        if named:
            files = [file for file in named if _split_of(file) == spec.split]
            if not files:
                known = ", ".join(sorted({_split_of(file) for file in named}))
                raise problem(Where(spec.path), f"no file of the split {spec.split!r}", f"the folder has: {known}")
        elif spec.split != "train":
            raise _no_split(spec)
        return _one_kind(files, spec)
    if files:
        if spec.split != "train":
            raise _no_split(spec)
        return _one_kind(files, spec)
    if spec.path.startswith((".", "/", "~")) or form_of(place) or spec.path.count("/") > 1:
        hint = "a JSONL, CSV or parquet file, a folder or glob of them, or a Hub id such as openai/gsm8k"
        raise problem(Where(spec.path), "there is no such file or folder", hint)
    return ()


def _refuse_saved(folder: Path, spec: DataSpec) -> None:
    """Raise ConfigError for what `save_to_disk` of `datasets` writes: its JSON files hold no rows."""
    splits = (folder / "dataset_dict.json").is_file()
    if splits or ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        rows = f"datasets.load_from_disk({spec.path!r})" + (f"[{spec.split!r}]" if splits else "")
        text = "the folder was written by save_to_disk, whose Arrow files are not read"
        raise problem(Where(spec.path), text, f'write parquet: {rows}.to_parquet("{spec.split}.parquet")')


def _split_of(file: Path) -> str:
    """`test` of `test.jsonl`, `test-00000-of-00002.parquet` and `test_easy.jsonl`; '' for other names."""
    word = file.name.partition(".")[0].replace("_", "-").partition("-")[0].lower()
    return word if word in SPLITS else ""


def _no_split(spec: DataSpec) -> ConfigError:
    text = f"there is no split {spec.split!r}: these files are one data set"
    return problem(Where(spec.path), text, "name the other split's file as a data set of its own (eval.data.path)")


def _one_kind(files: Sequence[Path], spec: DataSpec) -> tuple[Path, ...]:
    forms = sorted({form_of(file) or "JSON lines" for file in files}, key=str.lower)
    if len(forms) > 1:
        text = f"{' and '.join(forms)} files side by side"
        raise problem(Where(spec.path), text, "name one kind, such as data/*.jsonl")
    packed = next((file for file in files if file.suffix in COMPRESSED and file.with_suffix("") in files), None)
    if packed is not None:
        text = f"{packed.name} lies beside {packed.stem}: the same rows would count twice"
        raise problem(Where(spec.path), text, "name one of them, such as data/*.jsonl")
    return tuple(files)


class _TextRows(ABC):
    """Rows that begin at a place in the text of one or more files: only the byte offset and line of each are held."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        self._contents = [Content(file) for file in files]
        self._starts: list[int] = []  # number of the first row of each file
        self._offsets, self._lines = array("Q"), array("L")
        for content in self._contents:
            self._starts.append(len(self._offsets))
            if limit is None or len(self._offsets) < limit:
                self._index(content, limit)

    @abstractmethod
    def _index(self, content: Content, limit: int | None) -> None:
        """Hold the offset and line of each row of a file, up to `limit` rows of all."""

    def __len__(self) -> int:
        return len(self._offsets)

    def _file(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def where(self, index: int) -> Where:
        return Where(str(self._contents[self._file(index)].file), self._lines[index])


class JsonRows(_TextRows):
    """JSON lines, of which blank ones are no rows, or the items of one JSON array."""

    all_text = False

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        super().__init__(files, limit)
        self.columns = column_names(self.read(0)) if self._offsets else ()

    def _index(self, content: Content, limit: int | None) -> None:
        with content.at(0) as stream:
            offset = 0
            for number, line in enumerate(stream, start=1):
                if limit is not None and len(self._offsets) >= limit:
                    return
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(content.lines[number - 1] if content.lines else number)
                offset += len(line)

    def read(self, index: int) -> RawRow:
        where = self.where(index)
        with self._contents[self._file(index)].at(self._offsets[index]) as stream:
            line = stream.readline()
        return json_row(line, where)


class CsvRows(_TextRows):
    """Records of CSV files, whose first one names the columns; blank lines are no rows."""

    all_text = True

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        self._headers: list[tuple[str, ...]] = []
        super().__init__(files, limit)
        self.columns = self._headers[0]

    def _index(self, content: Content, limit: int | None) -> None:
        with content.at(0) as stream:
            records = csv_records(stream, content.file)
            self._headers.append(csv_header(next(records, None), content.file))
            for record in records:
                if limit is not None and len(self._offsets) >= limit:
                    return
                self._offsets.append(record.offset)
                self._lines.append(record.line)

    def read(self, index: int) -> RawRow:
        number, where = self._file(index), self.where(index)
        content, names = self._contents[number], self._headers[number]
        with content.at(self._offsets[index]) as stream:
            record = next(csv_records(stream, content.file, where.line))
        if len(record.fields) != len(names):
            text = f"has {len(record.fields)} fields, and the header names {len(names)}"
            raise problem(where, text, "a field with the delimiter in it stands in quotes")
        return dict(zip(names, record.fields, strict=True))


class ParquetRows:
    """Rows of parquet files; decoded row groups are kept up to `CACHED_BYTES`."""

    all_text = False

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        import pyarrow  # late: only these data sets need it
        import pyarrow.parquet as parquet

        self._errors: tuple[type[Exception], ...] = (OSError, pyarrow.ArrowException)
        self._starts: list[int] = []  # number of the first row of each row group
        self._groups: list[tuple[Path, int]] = []
        self._handles: dict[Path, Any] = {}
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        n_rows = 0
        for file in files:
            try:
                handle = parquet.ParquetFile(file)
            except self._errors as error:
                raise problem(Where(str(file)), f"can't be read: {str(error).splitlines()[0]}") from error
            self._handles[file] = handle
            for group in range(handle.metadata.num_row_groups):
                self._starts.append(n_rows)
                self._groups.append((file, group))
                n_rows += handle.metadata.row_group(group).num_rows
        self._n_rows = n_rows if limit is None else min(n_rows, limit)
        self.columns = schema_names(next(iter(self._handles.values())).schema_arrow)

    def __len__(self) -> int:
        return self._n_rows

    def _locate(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def where(self, index: int) -> Where:
        return Where(str(self._groups[self._locate(index)[0]][0]), 0, f"row {index}: $")

    def read(self, index: int) -> RawRow:
        number, offset = self._locate(index)
        with self._lock:
            table = self._cache.get(number)
            if table is None:
                file, group = self._groups[number]
                try:
                    table = self._handles[file].read_row_group(group, use_threads=False)
                except self._errors as error:
                    raise problem(self.where(index), f"can't be read: {str(error).splitlines()[0]}") from error
                self._cache[number] = table
                while len(self._cache) > 1 and sum(cached.nbytes for cached in self._cache.values()) > CACHED_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(number)
        row: RawRow = table.slice(offset, 1).to_pylist()[0]
        return row


class HubRows:
    """A data set of the Hub, downloaded (or taken from the local cache) by `datasets`."""

    all_text = False

    def __init__(self, spec: DataSpec) -> None:
        reason = hub.out_of_reach()
        import datasets.config  # late: it is slow, and only these data sets need it

        if reason:
            datasets.config.HF_HUB_OFFLINE = True  # its own copy of the switch, read when it was imported
        self._name = f"{spec.path} ({spec.subset or 'default'}, {spec.split})"
        try:
            self._rows: Any = datasets.load_dataset(spec.path, spec.subset, split=spec.split)
        except Exception as error:  # the hub client raises of every kind: network, names, splits, formats
            text = f"can't be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            hint = "check the id, `data.subset`, `data.split` and the network; or name a local file"
            if reason:
                text = f"there is no such file or folder, and no data set of this id can be loaded: {reason}"
                hint = hub.hint(spec.path, "dataset")
            raise problem(Where(self._name), text, hint) from error
        self._n_rows = len(self._rows) if spec.limit is None else min(len(self._rows), spec.limit)
        self.columns = column_names(self._rows.features)

    def __len__(self) -> int:
        return self._n_rows

    def where(self, index: int) -> Where:
        return Where(self._name, 0, f"row {index}: $")

    def read(self, index: int) -> RawRow:
        try:
            return dict(self._rows[index])
        except (OSError, ValueError, KeyError) as error:
            raise problem(self.where(index), f"can't be read: {error}") from error
