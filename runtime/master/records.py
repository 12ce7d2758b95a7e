"""The files that every run writes: metrics.jsonl, transcripts.jsonl and trace.json (Chrome / Perfetto)."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.runtime.job.rotation import older
from realgraph.runtime.job.run_folder import fsync_path, private
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    Note,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)

TAIL_BYTES = 1 << 20  # more than any record has


class Appended:
    """A file that grows by whole records, each written at once: what a kill or a full disk leaves is readable.

    whole: how much of what an earlier run left is whole records; the rest (it ran out of disk) is cut off.
    most_bytes: from this size on it is `full`; None: never.
    """

    def __init__(self, path: Path, whole: Callable[[bytes], int], most_bytes: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._most = path, most_bytes
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - `close` closes it
        if path.is_file():
            with path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
                file.seek(start)
                self._file.truncate(start + whole(file.read()))
            self._file.seek(0, os.SEEK_END)
        self.empty = self._file.tell() == 0

    def write(self, record: bytes) -> None:
        """Append `record`. Raises OSError with the file's name where it does not fit."""
        left = memoryview(record)
        while left:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:
                error.filename = self._file.name
                raise
        self.empty = False

    @property
    def full(self) -> bool:
        """True where it is time for `rotate`."""
        return self._most is not None and self._file.tell() >= self._most

    def rotate(self) -> None:
        """Keep what there is beside an empty file, and forget what was kept before. Raises OSError."""
        self._file.close()
        os.replace(self._path, older(self._path))
        self._file = open(self._path, "ab", buffering=0, opener=private)  # noqa: SIM115 - `close` closes it
        self.empty = True

    def close(self) -> None:
        self._file.close()


def whole_lines(tail: bytes) -> int:
    """Bytes of the whole lines at the beginning of `tail`."""
    return tail.rfind(b"\n") + 1


def _whole_events(tail: bytes) -> int:
    """An event starts after a newline and has no other; the last one may be cut short."""
    end = tail.rfind(b"\n")
    try:
        msgspec.json.decode(tail[end + 1 :])
    except (msgspec.DecodeError, RecursionError):
        return max(0, end - 1)  # without the comma, or the opening bracket, before it
    return len(tail)


class JsonLines:
    """One JSON object a line. most_bytes: of this file and of the one before it, each; None: it grows without end."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._file = Appended(path, whole_lines, most_bytes)

    def write(self, value: object) -> None:
        if self._file.full:
            self._file.rotate()
        self._file.write(msgspec.json.encode(value) + b"\n")

    def close(self) -> None:
        self._file.close()


class MetricsFile:
    """metrics.jsonl: starts, steps, evaluations, checkpoints and the end of a run; a resumed run appends."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted() | StepRecord() | EvalRecord() | CheckpointRecord() | RunEnded():
                self._lines.write(record)
            case Span() | Transcript() | Note():
                pass

    def close(self) -> None:
        self._lines.close()


def has_begun(metrics: Path) -> bool:
    """False of a run that ended before all its workers were there: hosts that did not join, or were refused."""
    if not metrics.exists():
        return False
    with metrics.open("rb") as lines:
        return any(line.startswith(b'{"type":"start"') for line in lines)


class TranscriptsFile:
    """transcripts.jsonl: sampled prompts and responses with their scores."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._lines = JsonLines(path, most_bytes)

    def observe(self, record: RunRecord) -> None:
        if isinstance(record, Transcript):
            self._lines.write(record)

    def close(self) -> None:
        self._lines.close()


class _OfGroup(Struct, frozen=True):
    """The part of a sample's line that says whose it is."""

    group: int


def drop_repeated(file: Path, first: int, others: Collection[int]) -> None:
    """Remove the lines of groups that a resumed run makes again from a file of samples, and what was cut off at its
    end. first: of those groups, of which all later ones are; others: earlier ones. Raises OSError, with the file as it
    was."""
    decode = msgspec.json.Decoder(_OfGroup).decode

    def counts(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and (group := decode(line).group) < first and group not in others
        except msgspec.MsgspecError:
            return True  # no line of ours

    with file.open("rb") as lines:
        if all(map(counts, lines)):
            return
        lines.seek(0)
        partial = file.with_name(f".{file.name}.partial")
        with open(partial, "wb", opener=private) as kept:
            kept.writelines(line for line in lines if counts(line))
            kept.flush()
            os.fsync(kept.fileno())
    os.replace(partial, file)
    fsync_path(file.parent)


class TraceFile:
    """trace.json in the Chrome trace event format: a row per worker, a slice per call. Opens in ui.perfetto.dev.

    The closing bracket of the array is optional in the format, and so what a killed run leaves can be read, and a
    resumed one appends.
    Source: Trace Event Format, "JSON Array Format".
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._file = Appended(path, _whole_events, most_bytes)
        self._named: set[int] = set()

    def observe(self, record: RunRecord) -> None:
        if not isinstance(record, Span):
            return
        if self._file.full:
            self._file.write(b"]")
            self._file.rotate()
            self._named.clear()
        if record.worker not in self._named:
            self._named.add(record.worker)
            name = "master" if record.worker < 0 else f"worker {record.worker}"
            self._event({"name": "thread_name", "ph": "M", "pid": 0, "tid": record.worker + 1, "args": {"name": name}})
        self._event(
            {
                "name": record.call,
                "cat": "call",
                "ph": "X",
                "pid": 0,
                "tid": record.worker + 1,
                "ts": round(record.started * 1e6),
                "dur": max(1, round((record.ended - record.started) * 1e6)),
                "args": {"step": record.step},
            }
        )

    def _event(self, event: dict[str, object]) -> None:
        self._file.write((b"[\n" if self._file.empty else b",\n") + msgspec.json.encode(event))

    def close(self) -> None:
        self._file.close()
