"""Facts of a data set that need no reading of it all: its columns and number of rows. No network, no torch."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.data.columns import column_names, schema_names
from realgraph.runtime.data.row_content import (
    COMPRESSED,
    csv_header,
    csv_records,
    form_of,
    json_lines,
    json_row,
    unpacked,
)
from realgraph.runtime.data.row_files import data_files, files_at
from realgraph.runtime.job.job import DataSpec

# Rows of larger files are not counted: `check` answers at once.
MAX_COUNTED_BYTES = 2 * 10**9  # of JSON lines
MAX_PARSED_BYTES = 20 * 10**6  # of CSV, whose records are not lines, and of compressed files
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class LocalData(Struct, frozen=True):
    """None is unknown: a data set of the Hub, or a file that is too large to count."""

    columns: tuple[str, ...] | None = None
    n_rows: int | None = None


def probe_data(path: str, limit: int | None, where: Where, split: str = "train") -> LocalData:
    """Columns of the first row and rows up to `limit`, of a local file, folder or glob; a Hub id is unknown.

    Raises ConfigError at `where` for what is missing or can't be read.
    """
    if not files_at(path) and not Path(path).expanduser().is_dir():
        if is_hub_id(path):
            return LocalData()
        hint = "a JSONL, CSV or parquet file, a folder or glob of them, or a Hub id such as openai/gsm8k"
        raise ConfigError([Problem(where, f"no data at {path}", hint, "data")])
    try:
        files = data_files(DataSpec(path, split=split))
    except ConfigError as error:
        (problem,) = error.problems
        raise ConfigError([Problem(where, f"{path}: {problem.text}", problem.hint, problem.rule)]) from error
    form = form_of(files[0])
    if form == "parquet":
        return _probe_parquet(files, limit, where)
    try:
        return (_probe_csv if form == "CSV" else _probe_json_lines)(files, limit, where)
    except ConfigError as error:  # what is wrong with a file is reported at the place that names it
        raise ConfigError([_at(problem, where) for problem in error.problems]) from error
    except OSError as error:
        raise ConfigError([Problem(where, f"{path} can't be read: {error.strerror or error}", "", "data")]) from error


def _at(problem: Problem, where: Where) -> Problem:
    if problem.where == where:
        return problem
    place = str(problem.where).removesuffix(": $")
    return Problem(where, f"{place} {problem.text}", problem.hint, problem.rule)


def is_hub_id(path: str) -> bool:
    """True where a path that is not there can be the id of a data set or model on the Hub."""
    looks_local = path.startswith((".", "/", "~")) or form_of(Path(path)) is not None
    return not looks_local and _HUB_ID.fullmatch(path) is not None


def first_rows(file: Path, most: int, where: Where) -> Iterator[dict[str, Any]]:
    """The first `most` rows of a file of JSON lines or CSV; of a parquet file none. Raises ConfigError at `where`."""
    form = form_of(file)
    if form == "parquet":
        return
    try:
        with unpacked(file) as stream:
            if form == "CSV":
                records = csv_records(stream, file)
                names = csv_header(next(records, None), file)
                yield from (dict(zip(names, record.fields, strict=False)) for record in islice(records, most))
                return
            lines = islice(json_lines(stream, file), most)
            yield from (json_row(line, where, f"{file}:{number} ") for number, line in lines)
    except ConfigError as error:
        raise ConfigError([_at(problem, where) for problem in error.problems]) from error


def _probe_json_lines(files: Sequence[Path], limit: int | None, where: Where) -> LocalData:
    countable = limit is not None or _countable(files, MAX_COUNTED_BYTES)
    columns: tuple[str, ...] | None = None
    n_rows = 0
    for file in files:
        with unpacked(file) as stream:
            for number, line in json_lines(stream, file):
                if columns is None:
                    columns = column_names(json_row(line, where, f"{file}:{number} "))
                    if not countable:
                        return LocalData(columns)
                n_rows += 1
                if n_rows == limit:
                    return LocalData(columns, n_rows)
    return LocalData(columns, n_rows)


def _countable(files: Sequence[Path], most: int) -> bool:
    packed = any(file.suffix in COMPRESSED for file in files)
    return sum(file.stat().st_size for file in files) <= (MAX_PARSED_BYTES if packed else most)


def _probe_csv(files: Sequence[Path], limit: int | None, where: Where) -> LocalData:
    countable = limit is not None or _countable(files, MAX_PARSED_BYTES)
    columns: tuple[str, ...] | None = None
    n_rows = 0
    for file in files:
        with unpacked(file) as stream:
            records = csv_records(stream, file)
            header = csv_header(next(records, None), file)
            columns = columns or header
            if not countable:
                return LocalData(columns)
            for _ in records:
                n_rows += 1
                if n_rows == limit:
                    return LocalData(columns, n_rows)
    return LocalData(columns, n_rows)


def _probe_parquet(files: Sequence[Path], limit: int | None, where: Where) -> LocalData:
    try:
        import pyarrow.parquet as parquet  # late: only some data sets need it, and `check` must answer at once
    except ImportError:
        return LocalData()
    columns: tuple[str, ...] | None = None
    n_rows = 0
    for file in files:
        try:
            metadata = parquet.read_metadata(file)
            columns = columns or schema_names(parquet.read_schema(file))
        except (OSError, ValueError) as error:
            text = f"{file} can't be read: {str(error).splitlines()[0]}"
            raise ConfigError([Problem(where, text, "", "data")]) from error
        n_rows += metadata.num_rows
    return LocalData(columns, n_rows if limit is None else min(n_rows, limit))
