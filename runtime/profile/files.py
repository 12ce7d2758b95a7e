"""The folder through which the master and the workers of a profile talk: a task, models' shapes, what was measured."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from realgraph.planner.costs.calibrate.measurements import (
    DecodeCase,
    Measured,
    Pass,
    ProfileTask,
    RolloutCase,
    config_json,
)
from realgraph.planner.inputs.model_spec import ModelSpec


def task_file(folder: Path) -> Path:
    """The file of what is to be measured."""
    return folder / "task.json"


def points_file(folder: Path, worker: int) -> Path:
    """The file of what a worker has measured."""
    return folder / f"points-{worker}.json"


def rendezvous_file(folder: Path) -> Path:
    """Through which the workers find each other."""
    return folder / "store"


def model_folder(folder: Path, model: ModelSpec) -> Path:
    """The folder of a model's config.json."""
    return folder / "models" / f"{model.hidden}x{model.layers}"


def write_task(task: ProfileTask, folder: Path) -> None:
    """The task, and the models of its cases."""
    task_file(folder).write_bytes(msgspec.json.encode(task))
    for case in task.cases:
        if isinstance(case, Pass | DecodeCase | RolloutCase):
            place = model_folder(folder, case.model)
            place.mkdir(parents=True, exist_ok=True)
            (place / "config.json").write_bytes(msgspec.json.encode(config_json(case.model, task.dtype)))


def read_task(folder: Path) -> ProfileTask:
    """The task that `write_task` wrote."""
    return msgspec.json.decode(task_file(folder).read_bytes(), type=ProfileTask)


def write_points(points: Sequence[Measured], folder: Path, worker: int) -> None:
    """Writes what a worker has measured, in the order of the task's cases."""
    points_file(folder, worker).write_bytes(msgspec.json.encode(points))


def read_points(folder: Path, worker: int) -> tuple[Measured, ...]:
    """The measurements that `write_points` wrote."""
    return msgspec.json.decode(points_file(folder, worker).read_bytes(), type=tuple[Measured, ...])
