"""Experiment trackers as watchers of a run: TensorBoard by a switch; wandb, mlflow and trackio where installed."""

import importlib
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, assert_never, cast

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, in_words
from realgraph.runtime.job.job import Job, OutputSpec, TrackerName
from realgraph.runtime.job.run_folder import write_atomic
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
    WatcherLost,
)

Settings = Mapping[str, object]
StepKey = tuple[str, int]  # one of KINDS, step
KINDS = (STEP, EVAL) = ("step", "eval")  # of records, as metrics.jsonl has them
START_SECONDS = 300.0  # for a tracker to begin; clients give up before
END_SECONDS = 60.0  # for a tracker to take what is left when the run has ended


class Tracker(Protocol):
    """The interface of a tracker: begin, take numbers of a step, and end. Any of it may raise anything."""

    def start(self, name: str, settings: Settings, known: str | None) -> str | None:
        """Begin, or go on with the run that is `known` there. What it is known as from now on."""
        ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def end(self, ok: bool) -> None: ...


class TrackerObserver:
    """Feeds a tracker with the numbers of steps and evaluations, from a thread of its own: a service that is slow holds
    up no training, and one that is down ends none. Raises WatcherLost where it has failed.

    recorded: steps and evaluations that it has from an earlier start of the run, which now come again.
    """

    def __init__(self, name: str, tracker: Tracker, recorded: Container[StepKey] = ()) -> None:
        self._name, self._tracker, self._recorded, self._ended = name, tracker, recorded, False
        self._calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._pending = deque[Future[Any]]()
        Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def start(self, name: str, settings: Settings, known: str | None) -> str | None:
        """See Tracker. Raises TimeoutError, too."""
        call = self._call(partial(self._tracker.start, name, settings, known))
        try:
            return cast(str | None, call.result(START_SECONDS))
        except TimeoutError:
            if call.done():  # its client's own
                raise
            raise TimeoutError(f"it has not answered within {START_SECONDS:g} s") from None

    def observe(self, record: RunRecord) -> None:
        if self._ended:
            return
        match record:
            case StepRecord(step=step, metrics=metrics, seconds=seconds):
                self._log(STEP, step, {**metrics, "step_seconds": seconds})
            case EvalRecord(step=step, metrics=metrics):
                self._log(EVAL, step, {f"eval/{name}": value for name, value in metrics.items()})
            case RunEnded(ok=ok):
                self._ended = True
                self._pending.append(self._call(partial(self._tracker.end, ok)))
                self._calls.put(None)
            case RunStarted() | Span() | Transcript() | CheckpointRecord() | Note():
                pass
            case _:
                assert_never(record)
        while self._pending and self._pending[0].done():
            self._settle(0)

    def close(self) -> None:
        """Wait until it has taken all; end it where the run has not come to its own end. Raises WatcherLost."""
        self.observe(RunEnded(0, "", ok=False))
        end = time.monotonic() + END_SECONDS
        while self._pending:
            self._settle(max(0.0, end - time.monotonic()))

    def _log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if (kind, step) not in self._recorded:
            self._pending.append(self._call(partial(self._tracker.log, step, metrics)))

    def _settle(self, seconds: float) -> None:
        """See how the oldest call ended. Raises WatcherLost, and calls it no more, where it failed or is late."""
        call = self._pending.popleft()
        try:
            call.result(seconds)
        except Exception as error:  # a tracker's client raises of every kind
            self._ended = True
            self._pending.clear()
            why = in_words(error) if call.done() else f"it has not answered within {END_SECONDS:g} s"
            raise WatcherLost(f"{self._name} gets no more metrics (metrics.jsonl has them all): {why}") from error

    def _call(self, call: Callable[[], Any]) -> Future[Any]:
        self._calls.put((future := Future[Any](), call))
        return future

    def _work(self) -> None:
        """Make the calls, in order, until one fails. An executor would be waited for at the end of the process, however
        long its call hangs."""
        for future, call in iter(self._calls.get, None):
            try:
                future.set_result(call())
            except BaseException as error:  # raised by who waits for it
                future.set_exception(error)
                return


class TensorBoard:
    """Event files under `<run>/tensorboard`, written by torch's SummaryWriter; known by the name of that folder."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def start(self, name: str, settings: Settings, known: str | None) -> str:
        if known is None:
            self._writer.add_text("settings", "  \n".join(f"{key}: {value}" for key, value in settings.items()))
        return Path(self._writer.log_dir).name

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill would cost two minutes of them

    def end(self, ok: bool) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Its own steps only rise, so that the step is a metric, and evaluations may come later."""

    def __init__(self, project: str, run_dir: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._project, self._run_dir = project, run_dir

    def start(self, name: str, settings: Settings, known: str | None) -> str:
        options = {"dir": str(self._run_dir), "config": dict(settings), "resume": "allow", "allow_val_change": True}
        run = self._wandb.init(project=self._project, name=name, id=known, **options)
        self._wandb.define_metric("*", step_metric="step")
        return str(run.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._wandb.log({**metrics, "step": step})

    def end(self, ok: bool) -> None:
        self._wandb.finish(exit_code=0 if ok else 1)


class Trackio:
    """Trackio, the local-first tracker, which knows a run by its name."""

    def __init__(self, project: str) -> None:
        self._trackio = importlib.import_module("trackio")
        self._project = project

    def start(self, name: str, settings: Settings, known: str | None) -> str:
        run_name = known or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._trackio.init(project=self._project, name=run_name, config=dict(settings), resume="allow")
        return run_name

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def end(self, ok: bool) -> None:
        self._trackio.finish()


class MLflow:
    """MLflow."""

    def __init__(self, project: str) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._project = project

    def start(self, name: str, settings: Settings, known: str | None) -> str:
        self._mlflow.set_experiment(self._project)
        if known is not None:
            self._mlflow.start_run(run_id=known)
            return known
        run = self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(settings))
        return str(run.info.run_id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def end(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


def settings_of(job: Job) -> Settings:
    """The settings of a run that a tracker shows beside its curves, by their paths in the run file."""
    plain = {name: getattr(job, name) for name in ("steps", "seed", "staleness")}
    parts = {"params": job.params, "batch": msgspec.to_builtins(job.batch)}
    inside = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
    return {"graph": job.graph.name, **plain, **inside}


def make_trackers(outputs: OutputSpec, run_dir: Path, name: str, settings: Settings) -> list[TrackerObserver]:
    """The trackers that a run asks for, begun; those of a run that goes on go on with theirs.

    Raises ConfigError for a package that is not installed, or that can't begin: no key, no server.
    """
    trackers: dict[str, Tracker] = {}
    try:
        if outputs.tensorboard:
            trackers["tensorboard"] = TensorBoard(run_dir)
        trackers |= {tracker: _tracker(tracker, outputs.project, run_dir) for tracker in outputs.trackers}
    except ImportError as error:
        package = error.name or "tensorboard"
        path = "$.outputs.tensorboard" if package == "tensorboard" else "$.outputs.trackers"
        text = f"the tracker needs {package!r}, which is not installed"
        raise ConfigError([Problem(Where(path=path), text, f"pip install {package}")]) from error
    file = run_dir / "trackers.json"
    known = _known(file)
    before, recorded = dict(known), _recorded(run_dir / "metrics.jsonl")
    observers = {
        key: TrackerObserver(key, tracker, recorded if key in known else ()) for key, tracker in trackers.items()
    }
    for tracker_name, observer in observers.items():
        try:
            known_as = observer.start(name, settings, known.get(tracker_name))
        except Exception as error:  # its client raises of every kind
            text = f"{tracker_name} can't begin: {in_words(error)}"
            hint = f"sign in to {tracker_name}, see that its server answers, or leave it out"
            raise ConfigError([Problem(Where(path="$.outputs.trackers"), text, hint)]) from error
        if known_as is not None:
            known[tracker_name] = known_as
    if known != before:
        write_atomic(file, msgspec.json.encode(known))
    return list(observers.values())


class _Mark(Struct):
    """The part of a line of metrics.jsonl that says of what it is."""

    type: str
    step: int = 0


def _recorded(file: Path) -> set[StepKey]:
    """The steps and evaluations on record, but for the newest, which a kill may have kept from trackers."""
    if not file.exists():
        return set()
    decode, marks = msgspec.json.Decoder(_Mark).decode, list[StepKey]()
    for line in file.read_bytes().splitlines():
        with suppress(msgspec.MsgspecError):  # named at the end of the run
            mark = decode(line)
            marks += [(mark.type, mark.step)] * (mark.type in KINDS)
    return set(marks) - {marks[-1]} if marks else set()


def _known(file: Path) -> dict[str, str]:
    """tracker -> what it knows this run as. Raises ConfigError for a file that says neither."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str]) if file.exists() else {}
    except msgspec.DecodeError as error:
        hint = "delete it: trackers then begin new runs"
        raise ConfigError([Problem(Where(str(file)), f"is not what a run writes: {error}", hint)]) from error


def _tracker(name: TrackerName, project: str, run_dir: Path) -> Tracker:
    """Raises ImportError."""
    match name:
        case "wandb":
            return Wandb(project, run_dir)
        case "trackio":
            return Trackio(project)
        case "mlflow":
            return MLflow(project)
        case _:
            assert_never(name)
