"""Runs the units of function calls: quick built-ins here, everything else in subprocesses with a time limit.

Turns what happened to a unit into a checked value or an error that names its sample. Owns the pool of subprocesses.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType

from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit, UnitResult, check_output, error_output, keyword_names
from realgraph.runtime.functions.pool import FunctionOutcome, FunctionPool, PoolCall
from realgraph.runtime.functions.process import Bounds
from realgraph.runtime.functions.rewards import FUNCTIONS, INLINE

START_SECONDS = 120.0  # to start a subprocess and import the user's module
MAX_MEMORY_BYTES = 16 * 10**9
MAX_PROCESSES = 256


class FunctionError(Exception):
    """A function that can't be run at all: it can't be imported, or does not take its keywords."""


class _Batch:
    """The results of one `run` as they come, in any order, from the pool's thread."""

    def __init__(self, name: str, call: Function, units: Sequence[Unit]) -> None:
        self.name, self.call, self.units = name, call, units
        self.results: list[UnitResult | None] = [None] * len(units)
        self.broken = ""  # why the function can't be run at all
        self.detail = ""
        self.ended = threading.Event()
        self._left = len(units)
        self._lock = threading.Lock()

    def take(self, position: int, outcome: FunctionOutcome) -> None:
        """One unit has ended. The first failure ends a batch that may not go on with errors."""
        result = judge(self.name, self.call, self.units[position], outcome)
        with self._lock:
            if self.ended.is_set():
                return
            self.results[position] = result
            self._left -= 1
            if outcome.kind in ("load", "skipped"):
                self.broken, self.detail = f"{self.name}: {outcome.text}", outcome.detail
            failed = bool(result.error) and self.call.on_error == "fail"
            if self._left == 0 or failed or self.broken:
                self.ended.set()

    def wanted(self) -> bool:
        return not self.ended.is_set()

    def all_results(self) -> list[UnitResult]:
        return [result or UnitResult() for result in self.results]


class EarlyUnit:
    """A unit that runs before its command has come; the command's batch takes over what it gives. Thread-safe."""

    def __init__(self, call: Function, unit: Unit) -> None:
        self.unit = unit
        self._outcome: FunctionOutcome | None = None
        self._taker: Callable[[FunctionOutcome], None] | None = None
        self._wanted: Callable[[], bool] = lambda: True
        self._lock = threading.Lock()
        self.work = _pool_call(call, unit, self._take, lambda: self._wanted())
        self.work.early = True

    def _take(self, outcome: FunctionOutcome) -> None:
        with self._lock:
            self._outcome, taker = outcome, self._taker
        if taker is not None:
            taker(outcome)

    def give(self, taker: Callable[[FunctionOutcome], None], wanted: Callable[[], bool]) -> None:
        """From now on it is waited for. taker: called once with what it gives; wanted: as of a PoolCall."""
        self.work.early, self._wanted = False, wanted
        with self._lock:
            self._taker, outcome = taker, self._outcome
        if outcome is not None:
            taker(outcome)

    def drop(self) -> None:
        """Nobody will ask for it: it does not begin any more."""
        self._wanted = lambda: False


class FunctionHost:
    """Function calls of one worker. Thread-safe; close it, or use it in a `with`.

    user_dir: where `module:function` is imported from, and the functions' working folder. A subprocess starts when the
    first function needs one. memory_bytes: of each subprocess; default half of this machine's, at most 16 GB.
    max_processes: that one subprocess and all it starts may be; above that they are killed.
    """

    def __init__(
        self,
        user_dir: str,
        processes: int = 1,
        memory_bytes: int | None = None,
        start_seconds: float = START_SECONDS,
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._bounds = Bounds(memory_bytes or min(machine // 2, MAX_MEMORY_BYTES), max_processes)
        self._user_dir, self._n_processes, self._start_seconds = os.path.abspath(user_dir), processes, start_seconds
        self._pool: FunctionPool | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> "FunctionHost":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the subprocesses; what still runs ends with an error."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def pids(self) -> tuple[int, ...]:
        """The subprocesses alive now, by their guardians."""
        return self._pool.pids() if self._pool is not None else ()

    def check(self, name: str, call: Function) -> None:
        """Import the function of `call`, so that a mistake is found before any model works.

        Raises FunctionError where it can't be imported or does not take the keywords it will get.
        """
        if call.fn in FUNCTIONS:
            return
        probe = Unit((), dict.fromkeys(keyword_names(call)))
        batch = _Batch(name, Function(call.fn, env=call.env), [probe])
        work = _pool_call(batch.call, probe, partial(batch.take, 0), batch.wanted)
        work.probe = True
        self._open_pool().submit([work])
        self._await(batch, self._start_seconds * 2)

    def begin(self, call: Function, units: Sequence[Unit]) -> list[EarlyUnit]:
        """Run `call` on units that `run` is to be given later, in processes that have nothing else to do meanwhile. No
        call that runs in the worker's own process."""
        early = [EarlyUnit(call, unit) for unit in units]
        self._open_pool().submit([one.work for one in early])
        return early

    def run(
        self,
        name: str,
        call: Function,
        units: Sequence[Unit],
        deadline_seconds: float | None = None,
        early: Mapping[int, EarlyUnit] | None = None,
    ) -> list[UnitResult]:
        """Run `call` (named `name`) on every unit and wait; results in the order of `units`. early: those that run
        already, by their place there.

        A unit that fails has `error`. Under `on_error: fail` the first failure ends the run at once and the units that
        had not ended have no values and no error; under `score` a failed unit has `error_value`s besides. Raises
        FunctionError where the function itself can't be had, TimeoutError past `deadline_seconds` (default: what the
        units' own limits allow).
        """
        if not units:
            return []
        if call.fn in INLINE:
            return _run_inline(name, call, units)
        batch = _Batch(name, call, units)
        self._submit(batch, early=early or {})
        rounds = -(-len(units) // self._n_processes)
        own = 2 * self._start_seconds + 2 * rounds * (call.timeout_seconds + 5.0)  # twice: what shares a process
        self._await(batch, own if deadline_seconds is None else deadline_seconds)
        return batch.all_results()

    def _submit(self, batch: _Batch, *, early: Mapping[int, EarlyUnit]) -> None:
        works = []
        for position, unit in enumerate(batch.units):
            taker = partial(batch.take, position)
            if position in early:
                early[position].give(taker, batch.wanted)
            else:
                works.append(_pool_call(batch.call, unit, taker, batch.wanted))
        self._open_pool().submit(works)  # also of none: the pool looks again at those that were early

    def _open_pool(self) -> FunctionPool:
        with self._lock:
            if self._closed:
                raise RuntimeError("the function host is closed")
            if self._pool is None:
                self._pool = FunctionPool(self._user_dir, self._n_processes, self._bounds, self._start_seconds)
            return self._pool

    def _await(self, batch: _Batch, seconds: float) -> None:
        if not batch.ended.wait(seconds):
            batch.ended.set()
            open_units = [unit.name for unit, result in zip(batch.units, batch.results, strict=True) if result is None]
            text = f"{batch.name}: no answer for {len(open_units)} of {len(batch.units)} units within {seconds:g} s"
            raise TimeoutError(f"{text}; the first is {open_units[0]}")
        if batch.broken:
            error = FunctionError(batch.broken)
            if batch.detail:
                error.add_note(batch.detail)
            raise error


def _pool_call(
    call: Function, unit: Unit, done: Callable[[FunctionOutcome], None], wanted: Callable[[], bool]
) -> PoolCall:
    return PoolCall(call.fn, unit.kwargs | call.args, call.timeout_seconds, done, wanted, env=call.env)


def _run_inline(name: str, call: Function, units: Sequence[Unit]) -> list[UnitResult]:
    results = []
    for unit in units:
        started = time.perf_counter()
        try:
            value = FUNCTIONS[call.fn](**{**unit.kwargs, **call.args})
            outcome = FunctionOutcome("ok", value=value, seconds=time.perf_counter() - started)
        except Exception as error:  # a row that the function can't read: reported with its sample
            outcome = FunctionOutcome("error", text=f"{type(error).__name__}: {error}", detail=traceback.format_exc())
        results.append(judge(name, call, unit, outcome))
        if results[-1].error and call.on_error == "fail":
            return results + [UnitResult()] * (len(units) - len(results))
    return results


def judge(name: str, call: Function, unit: Unit, outcome: FunctionOutcome) -> UnitResult:
    """A unit's result from how its call ended, its value checked against the types that `call` writes."""
    text, detail = outcome.text, outcome.detail
    match outcome.kind:
        case "ok":
            try:
                return UnitResult(check_output(call, unit, outcome.value), seconds=outcome.seconds)
            except ValueError as error:
                text = str(error)
        case "timeout":
            text = f"took more than {call.timeout_seconds:g} s"
        case "died" | "error" | "load" | "skipped":
            pass
    scored = call.on_error == "score" and outcome.kind not in ("load", "skipped")
    return UnitResult(
        values=error_output(call, unit) if scored else {},
        error=f"{name}: {call.fn} on {unit.name}: {text}",
        detail=detail,
        sample=unit.samples[0] if len(unit.samples) == 1 else -1,
        seconds=outcome.seconds,
    )
