"""The subprocess that runs user functions: `python -m realgraph.runtime.function_child FD PARENT USER_DIR MEMORY`.

It reads calls from one inherited socket, answers each once, and ends when the socket does. A plain function runs in the
main thread; coroutines run at once on an event loop in a thread of its own. It imports no torch unless the user does.
"""

import asyncio
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from realgraph.runtime.functions import load_function, refuse_keywords
from realgraph.runtime.processes import cut_frame, die_with_parent

MAX_RESULT_BYTES = 64 * 2**20
MAX_DETAIL = 8_000  # characters of a traceback


class Call(Struct, frozen=True, tag=True):
    """Run `fn` once with `kwargs`; with `probe`, only load it and see whether it takes keywords of these names."""

    number: int
    fn: str
    timeout_seconds: float
    kwargs: dict[str, Any]
    probe: bool = False


class Loaded(Struct, frozen=True, tag=True):
    """The function of call `number` is there and starts now."""

    number: int
    is_async: bool


class Returned(Struct, frozen=True, tag=True):
    """What call `number` returned, and the bytes that this process holds."""

    number: int
    value: Any
    seconds: float
    held_bytes: int = 0


class Raised(Struct, frozen=True, tag=True):
    """Why call `number` gave nothing. load: the function can't be had or called, whatever the sample."""

    number: int
    kind: Literal["load", "error", "timeout"]
    text: str
    detail: str = ""


Answer = Loaded | Returned | Raised
encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(message: Call | Answer) -> bytes:
    """A message with its length before it, in the form of `processes.cut_frame`."""
    body = encode(message)
    return len(body).to_bytes(4, "big") + body


class Child:
    """The calls of one subprocess: its functions, its socket, and its event loop once a coroutine asks for one."""

    def __init__(self, owner: socket.socket, user_dir: str) -> None:
        self._owner, self._user_dir = owner, user_dir
        self._functions: dict[str, Callable[..., Any]] = {}
        self._sending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self) -> None:
        """Answer calls until the owner hangs up."""
        buffer = bytearray()
        while data := self._owner.recv(1 << 20):
            buffer += data
            while (body := cut_frame(buffer)) is not None:
                self._begin(decode_call(body))

    def _begin(self, call: Call) -> None:
        function = self._load(call)
        if function is None:
            return
        # An object with an async __call__ is a coroutine function too.
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method itself is asked for, not whether it is there
        )
        self._send(Loaded(call.number, is_async))
        if call.probe:
            self._send(Returned(call.number, None, 0.0))
        elif is_async:
            asyncio.run_coroutine_threadsafe(self._run_async(call, function), self._event_loop())
        else:
            self._run(call, function)

    def _load(self, call: Call) -> Callable[..., Any] | None:
        if call.fn not in self._functions:
            try:
                self._functions[call.fn] = load_function(call.fn, self._user_dir)
            except BaseException as error:  # a user's module may raise anything, SystemExit too
                self._send(_raised(call, "load", f"can't load {call.fn!r}", error))
                return None
        refused = refuse_keywords(self._functions[call.fn], tuple(call.kwargs))
        if refused:
            self._send(Raised(call.number, "load", f"can't call {call.fn!r}: {refused}"))
            return None
        return self._functions[call.fn]

    def _run(self, call: Call, function: Callable[..., Any]) -> None:
        started = time.perf_counter()
        try:
            value = function(**call.kwargs)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function failed, not this process
            self._send(_raised(call, "error", "", error))
            return
        self._answer(call, value, time.perf_counter() - started)

    async def _run_async(self, call: Call, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        started = time.perf_counter()
        limit = asyncio.timeout(call.timeout_seconds)
        try:
            async with limit:
                value = await function(**call.kwargs)
        except TimeoutError as error:
            if limit.expired():
                self._send(Raised(call.number, "timeout", ""))
            else:
                self._send(_raised(call, "error", "", error))
        except BaseException as error:
            self._send(_raised(call, "error", "", error))
        else:
            self._answer(call, value, time.perf_counter() - started)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        return self._loop

    def _answer(self, call: Call, value: object, seconds: float) -> None:
        try:
            message = frame(Returned(call.number, plain(value), seconds, held_bytes()))
        except Exception as error:  # whatever a user's object does when it is asked for its value
            self._send(_raised(call, "error", "returned what can't be sent", error))
            return
        if len(message) > MAX_RESULT_BYTES:
            text = f"returned {len(message) / 2**20:.0f} MiB, more than the {MAX_RESULT_BYTES / 2**20:.0f} MiB allowed"
            message = frame(Raised(call.number, "error", text))
        self._write(message)

    def _send(self, answer: Answer) -> None:
        self._write(frame(answer))

    def _write(self, message: bytes) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        with self._sending:
            self._owner.sendall(message)


def plain(value: Any) -> Any:
    """A value of plain Python types; numpy and torch give their `tolist()`. Raises TypeError for others."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} is no number, text, list or mapping")


def held_bytes() -> int:
    """Memory of this process: resident now on Linux, its peak elsewhere."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _raised(call: Call, kind: Literal["load", "error"], what: str, error: BaseException) -> Raised:
    """One line with the place in the user's code, and the traceback below our own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    theirs = [entry for entry in frames if not entry.filename.startswith((own, "<frozen"))]
    place = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    message = str(error).splitlines()
    text = f"{type(error).__name__}: {message[0][:500]}" if message else type(error).__name__
    detail = "".join(traceback.format_exception(error))
    return Raised(call.number, kind, f"{what + ': ' if what else ''}{text}{place}", detail[-MAX_DETAIL:])


def _limit(memory_bytes: int) -> None:
    """No core dump; at most `memory_bytes` of data (Linux); the first to go where the machine's memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(fd: int, parent: int, user_dir: str, memory_bytes: int) -> None:
    """The subprocess's whole life."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's to answer
    faulthandler.enable()
    _limit(memory_bytes)
    with socket.socket(fileno=fd) as owner:
        Child(owner, user_dir).serve()
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's modules must not keep us


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
