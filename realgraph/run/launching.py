"""From what a run file says under `launch` to the launcher of the run's workers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.detect import probe
from realgraph.run.running import PreparedRun
from realgraph.runtime.clusters.slurm import address_towards, the_allocation
from realgraph.runtime.clusters.srun import StartedBySrun
from realgraph.runtime.data.data import model_source
from realgraph.runtime.hosts.facts import split_address
from realgraph.runtime.hosts.launcher import HostsLauncher, JoinTerms, Needed, check_listen
from realgraph.runtime.hosts.starter import AgentStarter, StartedByHand
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.launch import HostsLaunch, LocalLaunch, OnHosts, SlurmLaunch
from realgraph.runtime.preflight.preflight import refuse_machine
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.processes.launcher import Launcher
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.wire.interfaces import address_of_interface


def launcher_of(prepared: PreparedRun, say: Callable[[str], None]) -> Launcher:
    """Starts the workers of a run where its run file says. say: shows a line to the user. Raises ConfigError for a plan
    that this machine would have to run and can't."""
    spec = prepared.checked.run.launch
    if isinstance(spec, LocalLaunch):
        refuse_machine(prepared.job, len(probe().gpus))
        return LocalLauncher()
    host, port = split_address(spec.listen) if isinstance(spec, HostsLaunch) else (_address(spec, prepared), 0)
    n_spare = prepared.job.runtime.restarts
    terms = JoinTerms(host, port, spec.interface, spec.join_seconds, n_spare, spec.trusted_network)
    check_listen(terms, "$.launch.listen" if port else "$.launch")
    return HostsLauncher(terms, needed_of(prepared), _starter(spec, prepared, say), say)


def needed_of(prepared: PreparedRun) -> Needed:
    """The needs of a run that its hosts must meet."""
    job = prepared.job
    return Needed(job.cluster, prepared.folder.root, tuple(_paths(job)), {**job.data_sums, **job.eval_sums})


def tell_needs(launcher: Launcher, prepared: PreparedRun) -> None:
    """Have a launcher know what a run needs now: the checksums of its data, its newest plan."""
    if isinstance(launcher, HostsLauncher):
        launcher.start_again(needed_of(prepared))


def _starter(spec: OnHosts, prepared: PreparedRun, say: Callable[[str], None]) -> AgentStarter:
    match spec:
        case HostsLaunch():
            return StartedByHand(say)
        case SlurmLaunch():
            n_nodes = len(the_allocation(variables()).nodes)
            return StartedBySrun(n_nodes, prepared.folder.logs / "srun.log", say)


def _address(spec: SlurmLaunch, prepared: PreparedRun) -> str:
    """The address of this host that all nodes of its allocation reach. Raises ConfigError where there is none, or it
    has fewer nodes than the plan."""
    allocation = the_allocation(variables())
    wanted = sum(group.nodes for group in prepared.job.cluster.groups)
    if len(allocation.nodes) < wanted:
        text = f"the plan has {wanted} nodes, and job {allocation.job} has {len(allocation.nodes)}"
        hint = f"allocate more, or plan for these: cluster.nodes={len(allocation.nodes)}"
        raise ConfigError([Problem(Where(path="$.cluster.nodes"), text, hint, "slurm")])
    return address_of_interface(spec.interface) if spec.interface else address_towards(allocation)


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
