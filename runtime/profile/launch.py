"""Starts the workers of a profile, waits for them, and reads what they measured. Master side: imports no torch."""

import asyncio
import tempfile
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.costs.calibrate.measurements import Measured, ProfileTask, merged
from realgraph.runtime.processes.launcher import Fleet, LaunchError, WorkerBoot, WorkerProgram, describe_exit
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.processes.open_files import allow_open_files
from realgraph.runtime.profile.files import read_points, write_task
from realgraph.runtime.wire.curve import make_keys

PROGRAM = WorkerProgram("realgraph.runtime.profile.worker:main", ("torch", "transformers"))
START_SECONDS = 180.0
SPARE_SECONDS = 150.0  # beyond the budget: building models, the warm-up round, the round in hand


def measure(task: ProfileTask, threads: int = 1) -> tuple[Measured, ...]:
    """Run the cases on all devices of this node at once. Raises ConfigError where a worker fails or is late."""
    allow_open_files(task.cluster.devices_per_node)
    with tempfile.TemporaryDirectory(prefix="realgraph-profile-") as name:
        folder = Path(name)
        write_task(task, folder)
        try:
            asyncio.run(_run(folder, task, threads))
        except LaunchError as error:
            raise _failed(f"the workers could not be started: {error}") from error
        points = [read_points(folder, worker) for worker in range(task.cluster.devices_per_node)]
    return merged(points)


async def _run(folder: Path, task: ProfileTask, threads: int) -> None:
    n_workers = task.cluster.devices_per_node
    boots = [
        WorkerBoot(
            worker=worker,
            master="",
            master_key="",
            keys=make_keys(),
            log=str(folder / f"worker-{worker}.log"),
            threads=threads,
            n_workers=n_workers,
        )
        for worker in range(n_workers)
    ]
    fleet = await LocalLauncher().start(boots, PROGRAM, START_SECONDS)
    try:
        async with asyncio.timeout(task.budget_seconds + SPARE_SECONDS):
            await _wait(fleet, n_workers)
    except TimeoutError:
        raise _failed(f"the workers measured for more than {task.budget_seconds + SPARE_SECONDS:.0f} s") from None
    finally:
        await fleet.terminate(0)


async def _wait(fleet: Fleet, n_workers: int) -> None:
    """Wait until every worker has ended well. Raises ConfigError with the end of the log of one that has not."""
    for _ in range(n_workers):
        worker, status = await fleet.wait_exit()
        if status:
            text = f"worker {worker} {describe_exit(status)}"
            raise _failed(f"{text}; its last words:\n{fleet.last_lines(worker)}")


def _failed(text: str) -> ConfigError:
    return ConfigError([Problem(Where("profile"), text, "", "profile")])
