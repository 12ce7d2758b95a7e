"""From what a run file says under `launch` to the launcher of the run's workers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.detect import probe
from realgraph.run.running import PreparedRun
from realgraph.runtime.data.data import model_source
from realgraph.runtime.hosts.launcher import HostsLauncher, Needed, check_listen
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.launch import HostsLaunch, LocalLaunch
from realgraph.runtime.preflight.preflight import refuse_machine
from realgraph.runtime.processes.launcher import Launcher
from realgraph.runtime.processes.local import LocalLauncher


def launcher_of(prepared: PreparedRun, say: Callable[[str], None]) -> Launcher:
    """Starts the workers of a run where its run file says. say: shows a line to the user. Raises ConfigError for a plan
    that this machine would have to run and can't."""
    job = prepared.job
    match prepared.checked.run.launch:
        case LocalLaunch():
            refuse_machine(job, len(probe().gpus))
            return LocalLauncher()
        case HostsLaunch() as spec:
            check_listen(spec)
            return HostsLauncher(spec, Needed(job.cluster, prepared.folder.root, tuple(_paths(job))), say)


def _paths(job: Job) -> Iterator[str]:
    """The paths on this host that workers read; each of them looks for other names in the Hub."""
    found = [job.user_dir, job.data.path, *([job.eval.data.path] if job.eval is not None and job.eval.data else [])]
    for role in job.graph.models:
        try:
            found.append(model_source(job.graph, role)[0])
        except ConfigError:
            continue  # a role without a model of its own
    for path in dict.fromkeys(found):
        if (place := Path(path).expanduser()).exists():
            yield str(place.absolute())
