"""The files that every run writes: metrics.jsonl, transcripts.jsonl and trace.json (Chrome / Perfetto)."""

from pathlib import Path
from typing import BinaryIO

import msgspec

from realgraph.runtime.observer import (
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


class JsonLines:
    """Appends one JSON object a line, flushed at once, so that a killed run keeps all but its last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")

    def write(self, value: object) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()

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


class TranscriptsFile:
    """transcripts.jsonl: sampled prompts and responses with their scores."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def observe(self, record: RunRecord) -> None:
        if isinstance(record, Transcript):
            self._lines.write(record)

    def close(self) -> None:
        self._lines.close()


class TraceFile:
    """trace.json in the Chrome trace event format: a row per worker, a slice per call. Opens in ui.perfetto.dev.

    The closing bracket of the array is optional in the format, so a killed run leaves a readable trace.
    Source: Trace Event Format, "JSON Array Format".
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._empty = self._file.tell() == 0
        self._named: set[int] = set()

    def observe(self, record: RunRecord) -> None:
        if not isinstance(record, Span):
            return
        if record.worker not in self._named:
            self._named.add(record.worker)
            name = "master" if record.worker < 0 else f"worker {record.worker}"
            self._event(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": record.worker + 1, "args": {"name": name}}
            )
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
        self._file.write((b"[\n" if self._empty else b",\n") + msgspec.json.encode(event))
        self._empty = False

    def close(self) -> None:
        self._file.close()
