"""The subprocess that runs user functions, forked from its guardian.

It reads calls from one inherited socket, answers each once, and ends when the socket does. A plain function runs in the
main thread; coroutines run at once on an event loop in a thread of its own. It imports no torch unless the user does.
"""

import errno
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
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from realgraph.runtime.functions.functions import load_function, refuse_keywords
from realgraph.runtime.functions.messages import (
    MAX_RESULT_BYTES,
    Answer,
    FunctionLoaded,
    FunctionRequest,
    Raised,
    Returned,
    frame,
    next_call,
)
from realgraph.runtime.functions.user_errors import error_text, unicode_text
from realgraph.runtime.processes.processes import END_SIGNALS, die_with_parent
from realgraph.runtime.processes.titles import set_title

if TYPE_CHECKING:
    import asyncio

MAX_DETAIL_CHARACTERS = 8_000  # characters of a traceback
LINGER_SECONDS = 60.0


class Child:
    """The calls of one subprocess: its functions, its socket, and its event loop once a coroutine asks for one."""

    def __init__(self, owner: socket.socket, user_dir: str) -> None:
        self._owner, self._user_dir = owner, user_dir
        self._functions: dict[str, Callable[..., Any]] = {}
        self._sending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A copy of this process that a function forks off must neither take calls nor answer them.
        os.register_at_fork(after_in_child=owner.close)

    def serve(self) -> None:
        """Answer calls until the owner hangs up."""
        buffer = bytearray()
        while data := self._owner.recv(1 << 20):
            buffer += data
            while (call := next_call(buffer)) is not None:
                self._begin(call)

    def _begin(self, call: FunctionRequest) -> None:
        function = self._load(call)
        if function is None:
            return
        # An object with an async __call__ is a coroutine function too.
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method itself is asked for, not whether it is there
        )
        self._send(FunctionLoaded(call.number, is_async))
        if call.probe:
            self._send(Returned(call.number, None, 0.0))
        elif is_async:
            import asyncio  # late, here and below: it takes half of the time in which this process starts

            asyncio.run_coroutine_threadsafe(self._run_async(call, function), self._event_loop())
        else:
            self._run(call, function)

    def _load(self, call: FunctionRequest) -> Callable[..., Any] | None:
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

    def _run(self, call: FunctionRequest, function: Callable[..., Any]) -> None:
        started = time.perf_counter()
        try:
            value = function(**call.kwargs)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function failed, not this process
            self._send(_raised(call, "error", "", error))
            return
        self._answer(call, value, time.perf_counter() - started)

    async def _run_async(self, call: FunctionRequest, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        import asyncio

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

    def _event_loop(self) -> "asyncio.AbstractEventLoop":
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        return self._loop

    def _answer(self, call: FunctionRequest, value: object, seconds: float) -> None:
        try:
            message = frame(Returned(call.number, plain(value), seconds, resident_bytes()))
        except NotPlain as error:
            self._send(Raised(call.number, "error", f"returned {error}"))
            return
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
        if self._owner.fileno() < 0:
            print("a copy of the functions' process, made by os.fork, has returned from its function: it ends here")
            sys.stdout.flush()
            os._exit(1)
        try:
            with self._sending:
                self._owner.sendall(message)
        except OSError as error:
            print(f"an answer can't be sent: {error}", flush=True)
            if error.errno in (errno.EBADF, errno.ENOTSOCK):  # a function has closed it: the guardian says so
                time.sleep(LINGER_SECONDS)
            os._exit(1)


class NotPlain(Exception):
    """A value of a type that no function may return; the message says how to convert it."""


def plain(value: Any) -> Any:
    """A value of plain Python types; numpy and torch give their `tolist()`. Raises NotPlain for others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, int):  # of a type of its own, here and below: an enumeration, numpy.float64
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if inspect.iscoroutine(value):
        value.close()
        raise NotPlain("a coroutine that nothing has awaited: write the function as `async def`, and await it there")
    convert = (
        "float(...)" if hasattr(value, "__float__") else "list(...)" if isinstance(value, Iterable) else "str(...)"
    )
    raise NotPlain(
        f"a value of the type {_type_name(type(value))}, which is none of: bool, int, float, str, None, list, tuple, "
        f"dict, numpy, torch; convert it, for example by {convert}"
    )


def _type_name(kind: type) -> str:
    """`set`, `decimal.Decimal`."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def resident_bytes() -> int:
    """Memory of this process: resident now on Linux, its peak elsewhere."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _raised(call: FunctionRequest, kind: Literal["load", "error"], what: str, error: BaseException) -> Raised:
    """One line with the place in the user's code, and the traceback below our own frames."""
    try:
        detail = "".join(traceback.format_exception(error))
    except Exception as failed:  # an exception of the user's may do anything where it is looked at
        detail = f"the traceback can't be written: {type(failed).__name__}"
    text = f"{what + ': ' if what else ''}{error_text(error)}"
    if name := _missing_variable(error):
        text += f"; of the environment a function has what its call names: env: [{name}]"
    return Raised(call.number, kind, unicode_text(text), unicode_text(detail)[-MAX_DETAIL_CHARACTERS:])


def _missing_variable(error: BaseException) -> str:
    """The variable that `os.environ[...]` has been asked for in vain; '' for any other error."""
    last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    asked = last is not None and last.name == "__getitem__" and last.filename in ("<frozen os>", os.__file__)
    return str(error.args[0]) if isinstance(error, KeyError) and asked and error.args else ""


def _limit(memory_bytes: int) -> None:
    """No core dump; at most `memory_bytes` of data (Linux); the first to go where the machine's memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        Path("/proc/self/oom_score_adj").write_text("1000")


def _leave_signals_to_owner() -> None:
    """Ctrl-C and requests to end are the master's to answer. What functions start gets the default answers."""
    for signum in END_SIGNALS:
        signal.signal(signum, _ignore)  # a handler, since an ignored signal stays ignored in programs that are started
    forks = _Forks()
    os.register_at_fork(before=forks.hold, after_in_parent=forks.let_go, after_in_child=forks.answer)


def _ignore(signum: int, stack: FrameType | None) -> None:
    pass


class _Forks(threading.local):
    """Holds back requests to end while a function forks: one that comes before the copy answers by default ends it as
    soon as it does. `multiprocessing.Pool` sends them to copies that have just begun, and waits for their end."""

    def __init__(self) -> None:
        self._masks: list[set[int]] = []  # of signals, from before each fork of this thread

    def hold(self) -> None:
        self._masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS))

    def let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop())

    def answer(self) -> None:
        """In the copy, whose one thread is its main thread."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self.let_go()


def main(fd: int, parent: int, user_dir: str, memory_bytes: int) -> None:
    """The subprocess's whole life. fd: the socket of calls and answers. parent: its guardian."""
    die_with_parent(parent)
    _leave_signals_to_owner()
    set_title("realgraph functions")
    faulthandler.enable()
    _limit(memory_bytes)
    with socket.socket(fileno=fd) as owner:
        owner.set_inheritable(False)
        Child(owner, user_dir).serve()
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's modules must not keep us
