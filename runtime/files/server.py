"""The run directory for workers whose hosts do not see it: checkpoints and samples are written and read for them.

On the host of the run, by threads of the master's process. Knows no tensor: a box of a file is runs of bytes.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from realgraph.runtime.files.messages import (
    MOST_FILE_BYTES,
    PIECE_BYTES,
    AppendLine,
    FileAnswer,
    FileBox,
    FileRefusal,
    FileReply,
    FileRequest,
    ListFolder,
    MakeFolder,
    ReadBox,
    SyncPath,
    WriteBox,
    decode_request,
    encode,
)
from realgraph.runtime.job.run_folder import RunFolder, fsync_path, private, write_at
from realgraph.runtime.master.records import TAIL_BYTES, whole_lines
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.refusals import UNREADABLE, Refusals
from realgraph.runtime.wire.sockets import SecureServer, TransportError

log = logging.getLogger(__name__)

THREADS = 4  # that read and write at once
SEND_SECONDS = 30.0


class FileServer:
    """Serves `folder` to the holders of the keys `allowed`, at `address`. Make it inside a running event loop."""

    def __init__(self, folder: RunFolder, allowed: Collection[str], interface: str) -> None:
        keys = make_keys()
        self._refusals = Refusals(log)
        self._disk, self._allowed = _Disk(folder), frozenset(allowed)
        self._server = SecureServer(keys, allowed, f"tcp://{interface}:0")
        self.address, self.key = self._server.address, keys.public
        self._threads = ThreadPoolExecutor(THREADS, "files")
        self._answering: set[asyncio.Task[None]] = set()
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Close the port. What is still being written is left to its thread."""
        tasks = (self._serving, *self._answering)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._server.close()

    async def _serve(self) -> None:
        while True:
            frames = await self._server.receive()
            try:
                if len(frames) != 2 or frames[1].get("User-Id") not in self._allowed:
                    raise msgspec.ValidationError(f"{len(frames)} frames, expected 2 of a worker")
                request = decode_request.decode(frames[1].buffer)
            except UNREADABLE as error:
                self._refusals.add(f"refused a request for a file: {error}")
                continue
            task = asyncio.create_task(self._answer(frames[0].bytes, request))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, client: bytes, request: FileRequest) -> None:
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._disk.reply, request)
        try:
            await self._server.send(client, encode(reply), "a worker that writes a file", SEND_SECONDS)
        except TransportError as error:
            log.warning("%s", error)


class _Disk:
    """The part of a run directory that workers read and write: its checkpoints and samples. From any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._open = (folder.checkpoints, folder.samples)

    def reply(self, request: FileRequest) -> FileReply:
        try:
            return self._done(request, self._path(request.path))
        except OSError as error:
            path = str(error.filename or request.path)
            return FileRefusal(request.number, error.errno or errno.EIO, error.strerror or str(error), path)

    def _path(self, text: str) -> Path:
        """Raises OSError for a path that is not a worker's to touch."""
        if "\0" not in text:
            path = Path(text).resolve()
            if any(path.is_relative_to(place.resolve()) for place in self._open):
                return path
        raise PermissionError(errno.EACCES, "not a file of the run's checkpoints or samples", text)

    def _done(self, request: FileRequest, path: Path) -> FileAnswer:
        """Raises OSError."""
        match request:
            case MakeFolder():
                path.mkdir(parents=True, exist_ok=True)
            case WriteBox():
                _write_box(path, request)
            case AppendLine(line=line):
                _append_line(path, line)
            case SyncPath():
                fsync_path(path)
            case ReadBox(box=box):
                return FileAnswer(request.number, _read_box(path, box))
            case ListFolder():
                sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
                return FileAnswer(request.number, sizes=sizes)
        return FileAnswer(request.number)


def _write_box(path: Path, request: WriteBox) -> None:
    """Raises OSError."""
    box, data = request.box, memoryview(request.data)
    _check(path, box)
    if box.nbytes != len(data) or not box.end <= request.file_bytes <= MOST_FILE_BYTES:
        text = f"a box of {box.nbytes} bytes came with {len(data)}, up to byte {box.end} of {request.file_bytes}"
        raise OSError(errno.EINVAL, text, str(path))
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(handle).st_size != request.file_bytes:
            os.ftruncate(handle, request.file_bytes)  # whoever comes first makes room
        run, places = box.runs()
        for i, place in enumerate(places):
            write_at(handle, data[i * run : (i + 1) * run], place)
    finally:
        os.close(handle)


def _read_box(path: Path, box: FileBox) -> bytes:
    """Raises OSError, also for a box that the file does not have."""
    _check(path, box)
    pieces = []
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        run, places = box.runs()
        for place in places:
            pieces.append(os.pread(handle, run, place))
            if len(pieces[-1]) != run:
                raise OSError(errno.EIO, f"it ends before byte {place + run}", str(path))
    finally:
        os.close(handle)
    return b"".join(pieces)


def _check(path: Path, box: FileBox) -> None:
    """Raises OSError for what is no box, or too large for a message."""
    fault = box.fault or ("" if box.nbytes <= PIECE_BYTES else f"it has {box.nbytes} bytes")
    if fault:
        raise OSError(errno.EINVAL, f"this is no box of a file: {fault}", str(path))


def _append_line(path: Path, line: bytes) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", opener=private) as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - TAIL_BYTES)
        file.seek(max(0, end - 1))
        if end and file.read() != b"\n":
            file.seek(start)
            file.truncate(start + whole_lines(file.read()))
        file.write(line)
