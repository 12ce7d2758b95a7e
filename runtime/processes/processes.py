"""Child processes that start fast and never outlive us: a fork server of our own, and what ties a child to its parent.

The fork server is the parent of every process it starts, so it alone signals and reaps them: no process id is ever used
after its process is gone. When its owner ends, in whatever way, it kills its children with their whole process groups,
and ends. A fork server that is itself killed takes its children along through the kernel; of their children, those that
call `die_with_parent`. On Linux it adopts what its children leave behind, daemons included, and kills what does not
end by itself within a moment.
Signals that ask for an end are the owner's to answer, so that an orderly end has all processes to work with, however
many of them the signal was sent to. Knows nothing of workers and keys.
"""

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import msgspec
from msgspec import Struct

from realgraph.runtime.processes.descendants import (
    adopt_orphans,
    is_childless,
    kill_descendants,
    kill_group,
    reap_with_group,
)
from realgraph.runtime.processes.titles import set_title
from realgraph.runtime.wire.frames import cut, framed

_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR2  # has a process write the stacks of its threads
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal, systemd and batch systems send them to all
_OWN_END_SECONDS = 1.0  # for what our children leave behind to end by itself: it may have processes of its own to kill
_STRAY_SECONDS = 3.0  # for the kernel to let go of what is killed; the fork server waits no longer


class Spawn(Struct, frozen=True, tag=True):
    """Start process `number`."""

    number: int
    target: str  # `module:function`
    payload: bytes  # its argument
    log: str  # the file that its prints are appended to
    stacks: str  # the file that its stacks are appended to, each time it gets STACK_SIGNAL
    title: str  # what `ps` shows


class Signal(Struct, frozen=True, tag=True):
    """Signal process `number`, and with SIGKILL its whole process group; nothing happens where it has ended."""

    number: int
    signal: int


class Started(Struct, frozen=True, tag=True):
    """Process `number` runs as `pid`."""

    number: int
    pid: int


class Exited(Struct, frozen=True, tag=True):
    """Process `number` is gone."""

    number: int
    status: int  # its exit code, or -N where signal N ended it


class Preloaded(Struct, frozen=True, tag=True):
    """The server is ready."""

    error: str = ""  # the traceback of a module that could not be imported; '' if all could


Request = Spawn | Signal
Event = Started | Exited | Preloaded
encode = msgspec.msgpack.Encoder().encode
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def decode_event(body: bytes) -> Event:
    """The event that the fork server tells of."""
    return _EVENTS.decode(body)


def frame(message: Request | Event) -> bytes:
    """A message as it goes over the pipe."""
    return framed(encode(message))


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent, process `parent`, ends. Call it first thing in the child.

    Linux: by the kernel (the parent is strictly the thread that started us). Elsewhere: by a thread that looks four
    times a second.
    """
    if sys.platform == "linux":
        _set_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def end_signals_blocked() -> Iterator[None]:
    """Blocks END_SIGNALS for what this thread starts inside: none can end it before `leave_end_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_end_signals() -> None:
    """Ignore END_SIGNALS in this process: its owner answers them. Programs that it starts ignore them too."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def _ignored(number: int, frame: FrameType | None) -> None:
    """A signal that is left to the owner."""


def _set_death_signal(signum: int) -> None:
    """Linux: the signal that the kernel sends us when our parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _watch_parent(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


class Watched:
    """Another process, and whether it still exists. Linux: another one that got its number is not mistaken for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = -1
        self._ended = False
        if sys.platform == "linux":
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = True
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise  # else the kernel is older than 5.3

    def ended(self) -> bool:
        """A process that is stopped has not ended."""
        if self._descriptor >= 0 and not self._ended:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._ended = bool(poll.poll(0))
        elif not self._ended:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                self._ended = True
        return self._ended


def target_of(function: Callable[[bytes], None]) -> str:
    """`module:function`, which `resolve` takes in another process."""
    return f"{function.__module__}:{function.__name__}"


def resolve(target: str) -> Callable[..., None]:
    """The function that `module:function` names. Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def command_line(fd: int, preload: tuple[str, ...]) -> list[str]:
    """The command that runs a fork server on the inherited socket `fd`, with our own import path. Carries no secret."""
    path = [os.path.abspath(entry) for entry in sys.path]
    code = (
        "import sys, json; fd, parent, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; "
        f"from {__name__} import serve; serve(fd, parent, preload)"
    )
    return [sys.executable, "-c", code, json.dumps([fd, os.getpid(), path, preload])]


def serve(fd: int, parent: int, preload: list[str]) -> None:
    """The fork server's whole life: preload modules, then start, signal and reap children until the owner hangs up."""
    # elsewhere an owner's end is seen on the socket alone: a thread must not be there to fork
    if sys.platform == "linux":
        _set_death_signal(signal.SIGKILL)
    leave_end_signals()
    set_title("realgraph fork server")
    faulthandler.register(STACK_SIGNAL, all_threads=True)  # to stderr, which the launcher's user sees
    owner = socket.socket(fileno=fd)
    error = ""
    try:
        for name in preload:
            importlib.import_module(name)
    except Exception:  # whatever a user's module raises: the owner shows it
        error = traceback.format_exc()
    gc.collect()
    gc.freeze()  # children share these pages for longer
    children = _Children(owner, parent)
    if sys.platform == "linux":
        _set_death_signal(signal.SIGCONT)  # from here on there are children to be killed first, even if we are stopped
        adopt_orphans()
    children.post(Preloaded(error))
    children.serve()


class _Children:
    """The fork server's loop. Single-threaded, since it forks."""

    def __init__(self, owner: socket.socket, parent: int) -> None:
        self._owner = owner
        self._parent = parent
        self._pids: dict[int, int] = {}  # number -> pid, of those not reaped
        self._strays_until: float | None = None  # when strays are killed; None: there are none, as far as we know
        self._wake, self._wake_write = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGCONT):  # to wake the loop: a child's end, our owner's
            signal.signal(number, _ignored)

    def serve(self) -> None:
        """Serve the owner until it hangs up or ends; then kill and reap all children."""
        buffer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._owner, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while os.getppid() == self._parent:
                ready = {key.fileobj for key, _ in selector.select(self._stray_seconds())}
                if self._wake in ready:
                    self._wake.recv(4096)
                    self._reap(os.WNOHANG)
                if self._stray_seconds() == 0:
                    self._kill_strays()
                if self._owner in ready:
                    try:
                        piece = self._owner.recv(1 << 16)
                    except ConnectionResetError:  # it has ended, or hung up before it had read all
                        piece = b""
                    if not piece:
                        break
                    buffer += piece
                    while (body := cut(buffer)) is not None:
                        self._obey(_REQUESTS.decode(body))
        for number in self._pids:
            self._signal(number, signal.SIGKILL)
        self._reap(0)
        while self._stray_seconds():
            time.sleep(0.005)
            self._reap_strays()
        self._kill_strays()

    def _obey(self, request: Request) -> None:
        match request:
            case Spawn():
                self._spawn(request)
            case Signal(number=number, signal=signum):
                self._signal(number, signum)

    def _spawn(self, request: Spawn) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
            for inherited in (self._owner, self._wake, self._wake_write):
                inherited.close()
            _child(request, parent)
        self._pids[request.number] = pid
        self.post(Started(request.number, pid))

    def _signal(self, number: int, signum: int) -> None:
        pid = self._pids.get(number)  # not reaped, so the number is still its own
        if pid is None:
            return
        os.kill(pid, signum)
        if signum == signal.SIGKILL:
            kill_group(pid)

    def _reap(self, options: int) -> None:
        before = len(self._pids)
        for number, pid in tuple(self._pids.items()):
            status = reap_with_group(pid, options)
            if status is not None:
                del self._pids[number]
                self.post(Exited(number, status))
        if len(self._pids) < before:
            self._await_strays()
        self._reap_strays()

    def _await_strays(self) -> None:
        """Expect what our children leave to us, by their own end or by that of a process between."""
        if self._strays_until is None and sys.platform == "linux":
            self._strays_until = time.monotonic() + _OWN_END_SECONDS

    def _stray_seconds(self) -> float | None:
        """The time that strays have left to end by themselves; None where none are expected."""
        return None if self._strays_until is None else max(0.0, self._strays_until - time.monotonic())

    def _reap_strays(self) -> None:
        """Reap the strays that have ended; where one has, there may be more."""
        if sys.platform != "linux":
            return
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not is_childless():
            ended = os.waitid(os.P_ALL, 0, options)
            if ended is None or ended.si_pid in self._pids.values():
                return
            os.waitpid(ended.si_pid, 0)
            self._await_strays()
        self._strays_until = None

    def _kill_strays(self) -> None:
        self._strays_until = None
        if sys.platform == "linux":
            kill_descendants(spare=tuple(self._pids.values()), seconds=_STRAY_SECONDS)

    def post(self, event: Event) -> None:
        """Send the owner an event."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: the next read ends us
            self._owner.sendall(frame(event))


def _child(request: Spawn, parent: int) -> NoReturn:
    """A child's life: its own session, tied to its parent, output to its log; ends without the parent's exit hooks.

    Like its parent it leaves END_SIGNALS to the owner.
    """
    status = 1
    try:
        os.setsid()
        die_with_parent(parent)
        set_title(request.title)
        _redirect(request.log)
        faulthandler.enable()
        _write_stacks_to(request.stacks)
        resolve(request.target)(request.payload)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the last frame of this process: all that can be done is to say it
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _write_stacks_to(file: str) -> None:
    """Append the stacks of all threads to a file whenever STACK_SIGNAL comes. faulthandler writes them from the signal
    handler itself: also where the interpreter is stuck, and never any value."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def _redirect(log: str) -> None:
    """Stdin from nowhere; stdout and stderr, ours and that of libraries, to the log, line by line."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
