"""A log of every event that the Scheduler is told, with its time: a run, or the end of a long one, replays from it.

The file is a row of records: their length and checksums, then msgpack. The first is a `LogStart`, the others are
`LoggedEvent`s. A full file becomes `events.1.log`, the one before it is forgotten, and the next begins with the
Scheduler's whole state, so that it replays by itself. No prompt, sample or tensor is in it.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.commands.actions import Action, Checkpointed, CheckpointWritten, Event, Halt, Send
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.rotation import older
from realgraph.runtime.job.run_folder import private
from realgraph.runtime.scheduler.image import SchedulerImage
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Bye, Done, Heartbeat, Hello, Met, Ready, encode

LOG_FORMAT = 5  # version of LogStart and LoggedEvent, fields' names among it
BUFFER_BYTES = 1 << 16  # written at once, at the latest
HEAD = struct.Struct("<III")  # bytes of a record, their CRC-32, the CRC-32 of these two numbers


class LogStart(Struct, frozen=True, tag="start"):
    """A Scheduler as it was before the first event of the log."""

    job: bytes  # JSON
    workers: tuple[int, ...]
    n_rows: int
    n_eval_rows: int
    first: Checkpointed | None  # the state that the run went on from; None: it began
    checkpoint: str = ""  # the folder that `first` came from
    image: SchedulerImage | None = None  # None: nothing has happened before the first event
    n_before: int = 0  # events that an earlier file had
    format: int = LOG_FORMAT


class LoggedEvent(Struct, frozen=True, tag="event"):
    """One event."""

    now: float  # the time that the Scheduler was told
    event: Event | None  # None: its start
    commands: int  # checksum of all commands that the log's events before this one have brought


class DamagedLog(ValueError):
    """A log that is not what was written: the record at `place`, and how."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} {reason}")
        self.place, self.reason = place, reason


class Diverged(ValueError):
    """A replay brought other commands than the run had: those before the record at `place`."""

    def __init__(self, place: str) -> None:
        super().__init__(f"the commands before {place} are not those that the run gave")
        self.place = place


def checksum(actions: Iterable[Action], before: int) -> int:
    """CRC-32 of the commands, checkpoints and end among `actions`, and of all before."""
    lasting = [action for action in actions if isinstance(action, Send | CheckpointWritten | Halt)]
    return zlib.crc32(encode(lasting), before) if lasting else before


class EventLog:
    """The log that a run writes: `record` before the Scheduler is told, `acted` with what it answers.

    A log that lies at `path` already is that of an earlier life of the run: it is kept as the one before.
    """

    def __init__(self, path: Path, most_bytes: int, start: LogStart) -> None:
        self._path, self._most_bytes, self._start = path, most_bytes, start
        self._buffer = bytearray()
        self._n_events = self._n_bytes = self._commands = 0
        self._file = self._opened()
        self._put(start)
        self._start_bytes = self._n_bytes  # a state that is large is not written for every few events

    def _opened(self) -> BinaryIO:
        if self._path.exists():
            os.replace(self._path, older(self._path))
        return open(self._path, "wb", buffering=0, opener=private)

    def record(self, event: Event | None, now: float, image: Callable[[], SchedulerImage]) -> None:
        """Log `event` (None: the start), which the Scheduler of `image` is told next. Raises OSError."""
        if isinstance(event, Hello | Ready | Met | Heartbeat | Bye):
            return  # it leaves the Scheduler as it is
        if self._n_bytes >= max(self._most_bytes, 2 * self._start_bytes):
            self._rotate(image())
        if isinstance(event, Done) and event.transcripts:
            event = replace(event, transcripts=())
        self._put(LoggedEvent(now, event, self._commands))
        self._n_events += 1
        if len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def acted(self, actions: Iterable[Action]) -> None:
        """The Scheduler's answer to what was logged last."""
        self._commands = checksum(actions, self._commands)

    def _rotate(self, image: SchedulerImage) -> None:
        self.flush()
        self._file.close()
        self._file = self._opened()
        self._n_bytes = self._commands = 0
        self._put(replace(self._start, image=image, n_before=self._n_events))
        self._start_bytes = self._n_bytes

    def _put(self, record: LogStart | LoggedEvent) -> None:
        content = encode(record)
        sums = (len(content), zlib.crc32(content))
        self._buffer += HEAD.pack(*sums, _crc_of(sums))
        self._buffer += content
        self._n_bytes += HEAD.size + len(content)

    def flush(self) -> None:
        """Write what is not yet written. Raises OSError with the file's name."""
        left, self._buffer = memoryview(bytes(self._buffer)), bytearray()
        while left:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:
                error.filename = str(self._path)
                raise

    def close(self) -> None:
        """Write the rest. Raises OSError."""
        try:
            self.flush()
        finally:
            self._file.close()


def _crc_of(sums: tuple[int, int]) -> int:
    return zlib.crc32(struct.pack("<II", *sums))


# --- reading ----------------------------------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, content) of every whole record; what a kill cut off is left out. Raises DamagedLog, OSError."""
    with path.open("rb") as file:
        number, offset = 1, 0
        while len(head := file.read(HEAD.size)) == HEAD.size:
            place = f"record {number} (byte {offset:,})"
            n_bytes, crc, crc_of_head = HEAD.unpack(head)
            if _crc_of((n_bytes, crc)) != crc_of_head:
                raise DamagedLog(place, "does not begin like one: this is no log of events, or a damaged one")
            content = file.read(n_bytes)
            if len(content) < n_bytes:
                return
            if zlib.crc32(content) != crc:
                raise DamagedLog(place, "is not what was written: its checksum differs")
            yield place, content
            number, offset = number + 1, offset + HEAD.size + n_bytes


class _FormatOfLog(Struct, frozen=True, tag="start"):
    format: int


class Replayed(Struct, frozen=True):
    """An event of a log, and what the Scheduler did about it."""

    place: str
    now: float
    event: Event | None
    actions: list[Action]


class Replay:
    """A log and the Scheduler that it is about, from the log's first event on. Raises DamagedLog, OSError."""

    def __init__(self, path: Path) -> None:
        self._records = _records(path)
        place, content = next(self._records, ("", b""))
        if not place:
            raise DamagedLog("record 1 (byte 0)", "is not there as a whole: nothing can be replayed")
        try:
            written = msgspec.msgpack.decode(content, type=_FormatOfLog).format
            if written != LOG_FORMAT:
                raise DamagedLog(place, f"has format {written}, this version reads {LOG_FORMAT}")
            self.start = msgspec.msgpack.decode(content, type=LogStart)
            self.job = msgspec.json.decode(self.start.job, type=Job)
        except msgspec.MsgspecError as error:
            raise DamagedLog(place, f"is no start that this version can read: {error}") from error
        start = self.start
        self.scheduler = Scheduler(self.job, start.workers, start.n_rows, start.first, start.n_eval_rows)
        if start.image is not None:
            self.scheduler.restore(start.image)

    def events(self) -> Iterator[Replayed]:
        """Tell the Scheduler event by event. Raises DamagedLog, Diverged, OSError."""
        decode, commands = msgspec.msgpack.Decoder(LoggedEvent).decode, 0
        for place, content in self._records:
            try:
                logged = decode(content)
            except msgspec.MsgspecError as error:
                raise DamagedLog(place, f"is no event that this version can read: {error}") from error
            if logged.commands != commands:
                raise Diverged(place)
            if logged.event is None:
                actions = self.scheduler.start(logged.now)
            else:
                actions = self.scheduler.on(logged.event, logged.now)
            commands = checksum(actions, commands)
            yield Replayed(place, logged.now, logged.event, actions)
