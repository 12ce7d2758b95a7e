"""The next start of a run that goes on by itself after a lost worker or host: when, and on what is left."""

import asyncio
from collections.abc import Iterator

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.cluster import Cluster
from realgraph.run.launching import needed_of
from realgraph.run.resume import ResumeOptions, prepare_resume
from realgraph.run.running import PreparedRun
from realgraph.runtime.hosts.launcher import HostsLauncher
from realgraph.runtime.job.launch import RayLaunch, SlurmLaunch
from realgraph.runtime.processes.launcher import Launcher

BACK_OFF_SECONDS, MOST_BACK_OFF_SECONDS = 5.0, 120.0


def back_off(restart: int) -> float:
    """Seconds to wait before a restart, from 1: twice as long each time."""
    return float(min(MOST_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2 ** (restart - 1)))


def prepared_again(prepared: PreparedRun, launcher: Launcher) -> PreparedRun:
    """The run from its newest checkpoint, on the hosts that join again: under its plan where they are enough, else
    under a new one. The caller owns the directory. Raises ConfigError where nothing fits them."""
    cluster, root = prepared.job.cluster, prepared.folder.root
    if not isinstance(launcher, HostsLauncher):
        return prepare_resume(root, ())
    fewer = launcher.n_coming < launcher.n_hosts
    if fewer and (cluster.more or not launcher.n_coming):
        left = f"{launcher.n_coming} of {launcher.n_hosts} hosts are left"
        hint = f"go on by hand: realgraph run --resume {root} --replan cluster.nodes=N"
        raise ConfigError([Problem(Where(str(root)), f"the run can't go on by itself: {left}", hint, "restarts")])
    asks_nodes = isinstance(prepared.checked.run.launch, SlurmLaunch | RayLaunch)  # of which one may not answer
    nodes = launcher.n_coming if fewer else cluster.nodes
    overrides = tuple(_said(cluster, nodes)) if (fewer or asks_nodes) and not cluster.more else ()
    again = prepare_resume(root, overrides, ResumeOptions(replan=fewer))
    launcher.start_again(needed_of(again))
    return again


def give_up(launcher: Launcher) -> None:
    """There is no other start."""
    if isinstance(launcher, HostsLauncher):
        asyncio.run(launcher.give_up())


def _said(cluster: Cluster, nodes: int) -> Iterator[str]:
    """The cluster as overrides, which leave nothing to the machines."""
    yield f"cluster.nodes={nodes}"
    yield f"cluster.devices={cluster.devices_per_node}"
    yield f"cluster.kind={cluster.kind}"
    yield f"cluster.memory_gb={cluster.memory_bytes / 1e9!r}"
    yield f"cluster.host_memory_gb={cluster.host_memory_bytes / 1e9!r}"
