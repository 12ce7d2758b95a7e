"""Subprocesses for user functions, kept by one thread: it starts, feeds, times, kills and replaces them.

Every piece of work ends: by an answer, by its time limit, or by the death of its process. Where several coroutines
share a process that dies or stops answering, nobody can say which is to blame, so each is run once more alone. Knows
nothing of samples and keys.
"""

import contextlib
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from realgraph.runtime.functions.messages import (
    Answer,
    ForeignBytesError,
    FunctionLoaded,
    FunctionRequest,
    Raised,
    Returned,
    frame,
    next_answer,
)
from realgraph.runtime.functions.process import CLOSE_SECONDS, Bounds, FunctionProcess

MAX_COROUTINES = 64  # of one process at once
GRACE_SECONDS = 1.0  # after its limit a coroutine is cancelled inside its process; then the process is killed


@dataclass(frozen=True)
class FunctionOutcome:
    """The end of a piece of work; `load`: the function can't be had or called at all."""

    kind: Literal["ok", "load", "error", "timeout", "died", "skipped"]
    value: Any = None
    text: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class PoolCall:
    """One call to make. `done` is called once, from the pool's thread; `wanted` may turn false while it waits."""

    fn: str
    kwargs: dict[str, Any]
    timeout_seconds: float
    done: Callable[[FunctionOutcome], None]
    wanted: Callable[[], bool]
    probe: bool = False
    env: tuple[str, ...] = ()  # names of variables that its process gets
    early: bool = False  # nobody waits for it yet: all others go before it. May turn false while it waits
    alone: bool = False
    repeated: bool = False  # the process that it ran in alone was killed from outside once
    deadline: float = float("inf")


@dataclass(eq=False)
class _Process:
    """A subprocess and the work it holds."""

    own: FunctionProcess
    env: frozenset[str]  # names of the variables that it knows
    asynchronous: dict[str, bool] = field(default_factory=dict)  # of each function loaded
    running: dict[int, PoolCall] = field(default_factory=dict)
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    retiring: bool = False

    def takes(self, work: PoolCall) -> bool:
        """True where `work` may start here now: alone, or beside coroutines if it is known to be one itself."""
        if self.retiring or self.env != frozenset(work.env):
            return False
        if not self.running:
            return True
        together = [*self.running.values(), work]
        return len(self.running) < MAX_COROUTINES and all(
            self.asynchronous.get(each.fn, False) and not each.alone for each in together
        )


class FunctionPool:
    """Subprocesses that run functions of `user_dir`: at most `processes` for each set of variables that is named."""

    def __init__(self, user_dir: str, processes: int, bounds: Bounds, start_seconds: float) -> None:
        self._user_dir, self._n_processes = user_dir, processes
        self._bounds, self._start_seconds = bounds, start_seconds
        self._processes: list[_Process] = []
        self._queue: deque[PoolCall] = deque()
        self._lock = threading.Lock()
        self._inbox: list[PoolCall] = []
        self._closing, self._why = False, "the function host was closed"
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        # One thread for the pool's whole life: the kernel counts the thread that starts a process as its parent.
        self._thread = threading.Thread(target=self._serve, name="functions", daemon=True)
        self._thread.start()

    def submit(self, works: Sequence[PoolCall]) -> None:
        """Queue work; thread-safe. Raises RuntimeError once the pool is closed."""
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the function pool takes no more work: {self._why}")
            self._inbox.extend(works)
            self._waker.send(b"w")

    def close(self) -> None:
        """Kill every subprocess with all that it has started; work that has not ended is `skipped`."""
        with self._lock:
            already, self._closing = self._closing, True
            if not already:
                self._waker.send(b"c")
        self._thread.join(CLOSE_SECONDS)

    def pids(self) -> tuple[int, ...]:
        """The subprocesses alive now, by their guardians."""
        return tuple(process.own.pid for process in list(self._processes))

    # --- below: the pool's own thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    self._queue.extend(self._inbox)
                    self._inbox.clear()
                self._dispatch()
                self._wait()
                self._kill_overdue()
        except Exception:  # a mistake of ours: whoever waits for an answer is given it
            self._why = f"the function host failed:\n{traceback.format_exc()}"
            raise
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._closing = True
            left = [*self._queue, *self._inbox]
        for process in list(self._processes):
            left += process.running.values()
            self._kill(process)
        for work in left:
            work.done(FunctionOutcome("skipped", text=self._why))
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _dispatch(self) -> None:
        """Start what can start, strictly in order, what is early last; work that nobody wants any more is dropped."""
        while self._queue:
            work = next((work for work in self._queue if not work.early), self._queue[0])
            if not work.wanted():
                self._queue.remove(work)
                work.done(FunctionOutcome("skipped", text="not run"))
                continue
            try:
                process = self._place(work)
            except OSError as error:  # no such folder, no process left, no memory
                text = f"can't start a process for functions in {self._user_dir}: {error}"
                self._queue.remove(work)
                work.done(FunctionOutcome("load", text=text))
                continue
            if process is None:
                return
            self._queue.remove(work)
            self._start(process, work)

    def _place(self, work: PoolCall) -> _Process | None:
        """An idle process that has the function, else an idle one, else a new one, else one that runs coroutines."""
        fit = [process for process in self._processes if process.takes(work)]
        idle = [process for process in fit if not process.running]
        if idle:
            return max(idle, key=lambda process: work.fn in process.asynchronous)
        if sum(process.env == frozenset(work.env) for process in self._processes) < self._n_processes:
            return self._spawn(frozenset(work.env))
        return min(fit, key=lambda process: len(process.running), default=None)

    def _spawn(self, env: frozenset[str]) -> _Process:
        process = _Process(FunctionProcess(self._user_dir, env, self._bounds), env)
        self._processes.append(process)
        self._selector.register(process.own.calls, selectors.EVENT_READ, process)
        return process

    def _start(self, process: _Process, work: PoolCall) -> None:
        self._number += 1
        number = self._number
        try:
            message = frame(FunctionRequest(number, work.fn, work.timeout_seconds, work.kwargs, work.probe))
        except (TypeError, OverflowError, ValueError) as error:
            work.done(FunctionOutcome("error", text=f"its inputs can't be sent to a subprocess: {error}"))
            return
        loading = work.fn not in process.asynchronous
        work.deadline = time.monotonic() + (self._start_seconds if loading else self._limit(process, work))
        process.running[number] = work
        process.outgoing += message
        self._flush(process)

    def _limit(self, process: _Process, work: PoolCall) -> float:
        return work.timeout_seconds + (GRACE_SECONDS if process.asynchronous.get(work.fn) else 0.0)

    def _wait(self) -> None:
        """Wait until a socket is ready, work arrives, or the next deadline."""
        due = min((work.deadline for process in self._processes for work in process.running.values()), default=None)
        seconds = None if due is None else max(0.0, due - time.monotonic())
        for key, events in self._selector.select(seconds):
            process: _Process | None = key.data
            if process is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif process in self._processes:
                if events & selectors.EVENT_WRITE:
                    self._flush(process)
                if events & selectors.EVENT_READ:
                    self._read(process)

    def _flush(self, process: _Process) -> None:
        try:
            while process.outgoing:
                sent = process.own.calls.send(process.outgoing)
                del process.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # it has died; reading will tell
            process.outgoing.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.outgoing else 0)
        self._selector.modify(process.own.calls, events, process)

    def _read(self, process: _Process) -> None:
        try:
            data = process.own.calls.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._died(process)
            return
        process.incoming += data
        try:
            while (answer := next_answer(process.incoming)) is not None:
                self._answer(process, answer)
        except ForeignBytesError as error:
            self._kill(process)
            text = f"wrote {error} to the socket that carries its answers, and its process was killed"
            self._blame(process, FunctionOutcome("died", text=f"{text}; what it prints belongs to standard output"))
            return
        if process.retiring and not process.running:
            self._kill(process)

    def _answer(self, process: _Process, answer: Answer) -> None:
        work = process.running.get(answer.number)
        if work is None:
            return
        match answer:
            case FunctionLoaded(is_async=is_async):
                process.asynchronous[work.fn] = is_async
                work.deadline = time.monotonic() + self._limit(process, work)
            case Raised(kind=kind, text=text, detail=detail):
                del process.running[answer.number]
                work.done(FunctionOutcome(kind, text=text, detail=detail))
            case Returned(value=value, seconds=seconds, resident_bytes=resident_bytes):
                del process.running[answer.number]
                # A process that has grown to half of what it may have is replaced before it runs out.
                process.retiring = process.retiring or resident_bytes > self._bounds.memory_bytes // 2
                work.done(FunctionOutcome("ok", value=value, seconds=seconds))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            late = [work for work in process.running.values() if work.deadline <= now]
            if late:
                loading = late[0].fn not in process.asynchronous
                kind: Literal["load", "timeout"] = "load" if loading else "timeout"
                text = f"importing {late[0].fn!r} took more than {self._start_seconds:g} s" if loading else ""
                self._kill(process)
                self._blame(process, FunctionOutcome(kind, text=text))

    def _died(self, process: _Process) -> None:
        self._forget(process)
        death = process.own.died()
        self._blame(process, FunctionOutcome("died", text=death.text), again=death.from_outside)

    def _blame(self, process: _Process, outcome: FunctionOutcome, again: bool = False) -> None:
        """The one work that the process held has failed, unless it may run `again`, which it may once; of several, each
        is run again alone."""
        works = list(process.running.values())
        process.running.clear()
        if len(works) == 1 and (works[0].repeated or not again):
            works[0].done(outcome)
            return
        for work in reversed(works):
            work.alone, work.repeated = True, len(works) == 1
            self._queue.appendleft(work)

    def _kill(self, process: _Process) -> None:
        self._forget(process)
        process.own.end()

    def _forget(self, process: _Process) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.own.calls)
