"""Experiment trackers as watchers of a run: TensorBoard by a switch; wandb, mlflow and trackio where installed."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, assert_never

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.job.job import TrackerName
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    Note,
    Observer,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)


class Tracker(Protocol):
    """The interface of a tracker: take the run's settings once, numbers of a step, and end."""

    def start(self, name: str, settings: dict[str, object]) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def end(self, ok: bool) -> None: ...


class TrackerObserver:
    """Feeds a tracker with the numbers of steps and evaluations."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted(name=name, graph=graph, steps=steps, facts=facts):
                self._tracker.start(name, {"graph": graph, "steps": steps, **facts})
            case StepRecord(step=step, metrics=metrics, seconds=seconds):
                self._tracker.log(step, {**metrics, "step_seconds": seconds})
            case EvalRecord(step=step, metrics=metrics):
                self._tracker.log(step, {f"eval/{name}": value for name, value in metrics.items()})
            case RunEnded(ok=ok):
                self._tracker.end(ok)
            case Span() | Transcript() | CheckpointRecord() | Note():
                pass
            case _:
                assert_never(record)

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files under `<run>/tensorboard`, written by torch's SummaryWriter."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def start(self, name: str, settings: dict[str, object]) -> None:
        self._writer.add_text("settings", "  \n".join(f"{key}: {value}" for key, value in settings.items()))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, ok: bool) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases."""

    def __init__(self, project: str, run_dir: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._project, self._run_dir = project, run_dir

    def start(self, name: str, settings: dict[str, object]) -> None:
        self._wandb.init(project=self._project, name=name, dir=str(self._run_dir), config=settings, resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._wandb.log(metrics, step=step)

    def end(self, ok: bool) -> None:
        self._wandb.finish(exit_code=0 if ok else 1)


class Trackio:
    """Trackio, the local-first tracker."""

    def __init__(self, project: str) -> None:
        self._trackio = importlib.import_module("trackio")
        self._project = project

    def start(self, name: str, settings: dict[str, object]) -> None:
        self._trackio.init(project=self._project, name=name, config=settings, resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._trackio.log(metrics, step=step)

    def end(self, ok: bool) -> None:
        self._trackio.finish()


class MLflow:
    """MLflow."""

    def __init__(self, project: str) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._project = project

    def start(self, name: str, settings: dict[str, object]) -> None:
        self._mlflow.set_experiment(self._project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(settings)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def end(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


def make_trackers(names: Sequence[TrackerName], tensorboard: bool, project: str, run_dir: Path) -> list[Observer]:
    """The watchers that a run asks for. Raises ConfigError naming the package that is not installed."""
    trackers: list[Tracker] = []
    try:
        if tensorboard:
            trackers.append(TensorBoard(run_dir))
        for name in names:
            match name:
                case "wandb":
                    trackers.append(Wandb(project, run_dir))
                case "trackio":
                    trackers.append(Trackio(project))
                case "mlflow":
                    trackers.append(MLflow(project))
                case _:
                    assert_never(name)
    except ImportError as error:
        package = error.name or "tensorboard"
        path = "$.outputs.tensorboard" if package == "tensorboard" else "$.outputs.trackers"
        text = f"the tracker needs {package!r}, which is not installed"
        raise ConfigError([Problem(Where(path=path), text, f"pip install {package}")]) from error
    return [TrackerObserver(tracker) for tracker in trackers]
