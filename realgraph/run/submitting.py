"""A run as a job of Slurm's: its batch script, and what happens when the job comes back from the queue."""

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.planner.inputs.allocated import is_whole
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import AUTO, CPU
from realgraph.planner.inputs.devices import device_kind
from realgraph.run.running import owned, prepare, refuse_unfree, root_of, unwritable_folder
from realgraph.run_file.compose import Checked, check_run
from realgraph.runtime.clusters.sbatch import SCRIPT, BatchScript, submit
from realgraph.runtime.clusters.slurm import current_allocation, requeue, requeue_due, restarts_of
from realgraph.runtime.job.launch import SlurmLaunch
from realgraph.runtime.job.run_folder import RunFolder, private
from realgraph.runtime.master.checkpoint_folders import recover
from realgraph.runtime.master.checkpoints import newest_intact
from realgraph.runtime.processes.environment import variables

LATE_SECONDS = 60.0  # by which Slurm may send its signal late
KEPT = (SCRIPT, ".lock")  # what a job that starts over leaves where it is, beside Slurm's own log
STEPS_TO_SAVE = 2  # the one in hand, and as long again for the checkpoint


class Submission(Struct, frozen=True):
    """A run that is to become a job. resume: the run directory that it goes on with; else `file` starts it."""

    file: Path | None
    overrides: Sequence[str]
    options: Sequence[str]  # further words of `realgraph run`
    resume: Path | None = None
    plan_file: Path | None = None
    costs_file: Path | None = None


def script_of(asked: Submission) -> tuple[BatchScript, str]:
    """The batch script, and a warning or ''. The run is checked, and planned where its cluster is said. Raises
    ConfigError."""
    source = RunFolder(asked.resume.expanduser().absolute()).config if asked.resume is not None else asked.file
    assert source is not None
    checked = check_run(source, asked.overrides)
    launch, cluster = checked.run.launch, checked.run.cluster
    if not isinstance(launch, SlurmLaunch):
        text, hint = (
            "--submit is for runs that Slurm starts",
            "set launch: {kind: slurm}, or override launch.kind=slurm",
        )
        raise ConfigError([Problem(checked.where("$.launch.kind"), text, hint, "slurm")])
    root = asked.resume.expanduser().absolute() if asked.resume is not None else root_of(checked)
    if asked.resume is None:
        refuse_unfree(checked)
    run = ["--resume", str(root)] if asked.resume is not None else [str(source.absolute())]
    at = [f"outputs.dir={root}"] if asked.resume is None else []
    words = [sys.executable, "-m", "realgraph", "run", *run, *asked.overrides, *at, *asked.options]
    nodes = cluster.nodes
    if nodes is None and "nodes" not in launch.options:
        hint = "set cluster.nodes, or launch.options: {nodes: N}"
        raise ConfigError([Problem(checked.where("$.cluster"), "how many nodes to ask for is not said", hint, "slurm")])
    gpus, cores = _devices(cluster)
    script = BatchScript(
        name=checked.name,
        folder=root,
        directory=Path.cwd(),
        words=words,
        save_seconds=launch.save_seconds,
        nodes=nodes,
        gpus_per_node=gpus,
        cores_per_node=cores,
        options=launch.options,
        setup=launch.setup,
        outlives_nodes=checked.run.runtime.restarts > 0,
    )
    return script, "" if asked.resume is not None else _warning(asked, checked, launch.save_seconds)


def _warning(asked: Submission, checked: Checked, save_seconds: int) -> str:
    """Plans the run where its cluster is said. Raises ConfigError."""
    if asked.file is None or not is_whole(checked.run.cluster):
        return ""
    plan = prepare(asked.file, asked.overrides, asked.plan_file, asked.costs_file).job.plan
    if STEPS_TO_SAVE * plan.latency_seconds <= save_seconds:
        return ""
    text = f"a step takes {plan.latency_seconds:.0f} s by the plan, and Slurm's signal comes {save_seconds} s"
    return f"{text} before the time limit: raise launch.save_seconds, or the last steps are lost"


def _devices(cluster: ClusterSpec) -> tuple[int, int]:
    """GPUs and cores of a node to ask for; 0 where the partition's own are meant."""
    if cluster.kind == AUTO:
        return 0, 0
    devices = cluster.devices or device_kind(cluster.kind).per_node
    return (0, devices) if cluster.kind == CPU else (devices, 0)


def submitted(script: BatchScript) -> str:
    """The id of the job, whose script lies in the run's directory. Raises ConfigError."""
    folder = RunFolder(script.folder)
    try:
        folder.root.parent.mkdir(parents=True, exist_ok=True)
        folder.root.mkdir(mode=0o700, exist_ok=True)
        path = folder.root / SCRIPT
        path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", opener=private) as file:
            file.write(script.text)
    except OSError as error:
        raise unwritable_folder(folder, error) from None
    return submit(path)


def come_back(file: Path, overrides: Sequence[str]) -> Path | None:
    """The run directory to go on with, where Slurm has put this process' job back into the queue before. None where
    this is its first start, or nothing was saved: what there is of the run is then moved aside. Raises ConfigError."""
    restarts = restarts_of(variables())
    if not restarts:
        return None
    checked = check_run(file, overrides)
    if not isinstance(checked.run.launch, SlurmLaunch) or not checked.run.outputs.dir:
        return None
    folder = RunFolder(root_of(checked))
    if not folder.job.is_file():
        return None
    with owned(folder):
        try:
            recover(folder)
            checkpoint, damaged = newest_intact(folder)
            if checkpoint is None and not damaged:
                _move_aside(folder, restarts)
                return None
        except OSError as error:
            raise unwritable_folder(folder, error) from None
    return folder.root


def _move_aside(folder: RunFolder, restarts: int) -> None:
    aside = folder.root / f"before-restart-{restarts}"
    aside.mkdir()
    for path in list(folder.root.iterdir()):
        if path != aside and path.name not in KEPT and not path.name.startswith(("slurm-", "before-restart-")):
            path.rename(aside / path.name)


def goes_back(checked: Checked) -> Iterator[str]:
    """Puts the job of an interrupted run back into the queue, where its time limit was why; lines that say so. Raises
    ConfigError."""
    launch = checked.run.launch
    allocation = current_allocation(variables()) if isinstance(launch, SlurmLaunch) and launch.requeue else None
    if allocation is None or not isinstance(launch, SlurmLaunch):
        return
    if requeue_due(allocation, datetime.now(), launch.save_seconds + LATE_SECONDS):
        requeue(allocation)
        yield f"  the time limit is near: job {allocation.job} goes back into the queue, and on from there"
