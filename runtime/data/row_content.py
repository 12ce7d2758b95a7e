"""Data files by their names, their bytes from any place on, and the records of CSV text. Knows no keys. No torch."""

import csv
import gzip
import io
import re
import tempfile
import threading
import zlib
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import msgspec

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import DType, fits

Form = Literal["JSON lines", "CSV", "parquet"]

FORMS: dict[str, Form] = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".zst")  # of JSON lines and CSV; parquet compresses by itself
_CHUNK_BYTES = 1 << 20
_CHAT = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")  # how a list of messages begins
_PEEKED_BYTES = 64  # of a file, to see whether it begins with `[`


def form_of(file: Path) -> Form | None:
    """The form of a file by its name, None where that says nothing: `train.csv.gz` is CSV."""
    packed = file.suffix in COMPRESSED
    form = FORMS.get(Path(file.stem).suffix if packed else file.suffix)
    return None if packed and form == "parquet" else form


def delimiter_of(file: Path) -> str:
    """The character between the fields of a CSV file."""
    return "\t" if ".tsv" in file.suffixes else ","


def problem(where: Where, text: str, hint: str = "") -> ConfigError:
    """One mistake in the data, to be raised."""
    return ConfigError([Problem(where, text, hint, "data")])


@contextmanager
def unpacked(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where it is compressed. Raises ConfigError, while they are read too."""
    try:
        if file.suffix == ".zst":
            import pyarrow  # late: only these files need it

            with pyarrow.input_stream(str(file), compression="zstd") as packed:
                yield cast(BinaryIO, io.BufferedReader(packed, _CHUNK_BYTES))  # it has no lines of its own
        else:
            with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
                yield cast(BinaryIO, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise problem(Where(str(file)), f"can't be unpacked: {error}", "is the file whole?") from error
    except OSError as error:
        raise problem(Where(str(file)), f"can't be read: {error.strerror or str(error).strip()}") from error


class Content:
    """The bytes of a file from any place on. Safe to use from several threads.

    A compressed file is unpacked once, into a temporary file without a name: nothing of it is left after any end. So is
    a JSON array of rows, into lines of which `lines` has the numbers in the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._spool: BinaryIO | None = None
        self.lines = array("L")
        with unpacked(file) as stream:
            listed = form_of(file) not in ("CSV", "parquet") and _begins_array(stream)
            if not listed and file.suffix not in COMPRESSED:
                return
            self._spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (it lives as long as the rows do)
            for number, line in json_lines(stream, file) if listed else ():
                self.lines.append(number)
                self._spool.write(line + b"\n")
            while chunk := stream.read(_CHUNK_BYTES):
                self._spool.write(chunk)

    @contextmanager
    def at(self, offset: int) -> Iterator[BinaryIO]:
        """A stream that begins at byte `offset`, for this one reader. Raises ConfigError."""
        try:
            if self._spool is not None:
                with self._lock:
                    self._spool.seek(offset)
                    yield self._spool
                return
            with self.file.open("rb") as stream:
                stream.seek(offset)
                yield stream
        except OSError as error:
            raise problem(Where(str(self.file)), f"can't be read: {error.strerror or error}") from error


def _begins_array(stream: BinaryIO) -> bool:
    """True of JSON text that is one array of rows, and not a row a line."""
    first = cast(io.BufferedReader, stream).peek(_PEEKED_BYTES)
    return first.removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def json_lines(stream: BinaryIO, file: Path) -> Iterator[tuple[int, bytes]]:
    """The text of each row on one line, and the number of the line that it begins in: a row a line, or of one array
    its items. Raises ConfigError."""
    if not _begins_array(stream):
        yield from ((number, line) for number, line in enumerate(stream, start=1) if line.strip())
        return
    text = stream.read().removeprefix(BOM_UTF8)
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "one array of JSON objects, or one JSON object per line"
        raise problem(Where(str(file)), f"begins as a JSON array and is none: {error}", hint) from error
    line, end = 1, 0
    for item in map(bytes, items):
        start = text.index(item, end)
        line += text.count(b"\n", end, start)
        yield line, item.replace(b"\n", b" ").replace(b"\r", b" ")  # no text in JSON holds either
        line, end = line + item.count(b"\n"), start + len(item)


def json_row(line: bytes, where: Where, place: str = "") -> dict[str, Any]:
    """The row that a JSON line holds; a byte order mark before it is no part of it. place: begins the messages.

    Raises ConfigError for a line that is no JSON object.
    """
    line = line.removeprefix(BOM_UTF8)
    hint = "one JSON object per line, or one array of them"
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise problem(where, f"{place}is not JSON: {error}", hint) from error
    if not isinstance(row, dict):
        raise problem(where, f"{place}is not a JSON object", hint)
    return row


class Record(NamedTuple):
    """A record of CSV text: the byte where it begins, its first line from 1, its fields."""

    offset: int
    line: int
    fields: list[str]


class _Lines:
    """Lines of a stream as text; `offset` and `number` count what was taken."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.offset, self.number = stream, 0, 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        raw = self._stream.readline()
        if not raw:
            raise StopIteration
        first = self.offset == 0
        self.offset += len(raw)
        self.number += 1
        text = raw.decode()
        return text.removeprefix("\ufeff") if first else text


def csv_records(stream: BinaryIO, file: Path, first_line: int = 1) -> Iterator[Record]:
    """The records of a stream of UTF-8 CSV text (RFC 4180: fields in quotes may hold line ends), blank lines left out.

    Raises ConfigError naming the line of a record that is none.
    """
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long sample
    lines = _Lines(stream)
    reader = csv.reader(lines, delimiter=delimiter_of(file), strict=True)
    while True:
        offset, line = lines.offset, first_line + lines.number
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            hint = "fields with quotes or line ends stand in quotes, and a quote within is doubled"
            raise problem(Where(str(file), line), f"is not CSV: {error}", hint) from error
        except UnicodeDecodeError as error:
            here = Where(str(file), first_line + lines.number - 1)
            raise problem(here, f"is not UTF-8 text: byte {error.start + 1} of the line") from error
        if fields:
            yield Record(offset, line, fields)


def csv_header(record: Record | None, file: Path) -> tuple[str, ...]:
    """The column names in the first record of a file. Raises ConfigError for names that are missing or given twice."""
    names = tuple(name.strip() for name in record.fields) if record is not None else ()
    twice = sorted({name for name in names if names.count(name) > 1})
    if not all(names) or twice:
        what = f"names {twice[0]!r} twice" if twice else "has a column without a name"
        line = record.line if record is not None else 1
        raise problem(Where(str(file), line), f"the header {what}", "the first line names the columns, each once")
    return names


def cell_value(text: str, dtype: DType) -> Any:
    """The value of a CSV cell as a key's dtype: a number, true or false, JSON, or the text as it is.

    Raises ValueError for a cell that holds none.
    """
    match dtype:
        case "bool":
            if text.strip().lower() in ("true", "false"):
                return text.strip().lower() == "true"
            return _number(text)
        case "int32" | "int64" | "float32" | "float64":
            return _number(text)
        case "json":
            try:
                return msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"expected JSON: {error}") from error
        case "tokens":
            return _messages(text)
        case "text":
            return text
        case "experts":
            raise ValueError("the experts of tokens are generation's to choose")


def _messages(text: str) -> Any:
    """The messages whose JSON a text is; any other text as it is. Raises ValueError for messages in other notation."""
    if not _CHAT.match(text):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"a list of messages that is no JSON: {error}; json.dumps writes it, str does not") from error


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {text!r}" if text else "expected a number, got nothing") from None


def kind(value: Any) -> str:
    """A wrong value, for a problem."""
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def number(value: Any, dtype: DType) -> int | float:
    """A number of the dtype. Raises ValueError."""
    whole = dtype in ("int32", "int64")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not fits(value, dtype):
            raise ValueError(f"expected a finite number within {dtype}, got {kind(value)}")
        if not whole or int(value) == value:
            return int(value) if whole else float(value)
    hint = ": a number stands without quotes" if isinstance(value, str) else ""
    raise ValueError(f"expected {dtype}, got {kind(value)}{hint}")


def mask_of(value: Any) -> list[bool]:
    """A mask of the data. Raises ValueError."""
    if not isinstance(value, list) or not all(item in (0, 1) for item in value):
        raise ValueError(f"expected a list of 0 and 1, or of true and false, got {kind(value)}")
    return [bool(item) for item in value]


def is_ids(value: Any) -> bool:
    """True of a list of whole numbers, one at least."""
    return isinstance(value, list) and bool(value) and all(_is_id(item) for item in value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids(value: Any) -> list[int]:
    """Token ids of the data. Raises ValueError."""
    if not is_ids(value):
        raise ValueError(f"expected a list of token ids, got {kind(value)}")
    return cast(list[int], value)
