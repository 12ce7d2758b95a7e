"""From what a run file says under `launch` to the launcher of the run's workers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Function
from realgraph.planner.inputs.detect import probe
from realgraph.run.running import PreparedRun
from realgraph.run_file.user_code import uses
from realgraph.runtime.clusters import slurm
from realgraph.runtime.clusters.ray_cluster import RayCluster, address_towards, bundles_of, check_room
from realgraph.runtime.clusters.slurm import the_allocation
from realgraph.runtime.clusters.srun import agents_by_srun
from realgraph.runtime.data.data import model_source
from realgraph.runtime.data.sums import sampled_sums
from realgraph.runtime.hosts.facts import split_address
from realgraph.runtime.hosts.launcher import HostsLauncher, JoinTerms, Needed, check_listen
from realgraph.runtime.hosts.starter import AgentStarter, StartedByHand
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.launch import HostsLaunch, LocalLaunch, RayLaunch, SlurmLaunch
from realgraph.runtime.job.manifest import FileSum
from realgraph.runtime.master.startup import PROGRAM
from realgraph.runtime.preflight.preflight import refuse_machine
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.processes.launcher import Launcher
from realgraph.runtime.processes.local import LocalLauncher
from realgraph.runtime.wire.interfaces import address_of_interface

MODEL_FILES = ("*.json", "*.safetensors")  # of a model's folder: what workers read


def launcher_of(prepared: PreparedRun, say: Callable[[str], None]) -> Launcher:
    """Starts the workers of a run where its run file says. say: shows a line to the user. Raises ConfigError for a plan
    that this machine would have to run and can't."""
    spec = prepared.checked.run.launch
    if isinstance(spec, LocalLaunch):
        refuse_machine(prepared.job, len(probe().gpus))
        return LocalLauncher()
    starter: AgentStarter
    match spec:
        case HostsLaunch():
            host, port, starter = *split_address(spec.listen), StartedByHand(say)
        case SlurmLaunch():
            host, port, starter = _in_allocation(spec, prepared, say)
        case RayLaunch():
            host, port, starter = _on_ray(spec, prepared, say)
    n_spare = prepared.job.runtime.restarts
    terms = JoinTerms(host, port, spec.interface, spec.join_seconds, n_spare, spec.trusted_network)
    check_listen(terms, "$.launch.listen" if port else "$.launch")
    return HostsLauncher(terms, needed_of(prepared), starter, say)


def loading(launcher: Launcher, job: Job) -> AbstractContextManager[None]:
    """Load the modules of a run's workers on this host meanwhile, where they start on it."""
    return launcher.loading(PROGRAM, job.runtime.threads) if isinstance(launcher, LocalLauncher) else nullcontext()


def needed_of(prepared: PreparedRun) -> Needed:
    """The needs of a run that its hosts must meet."""
    job = prepared.job
    calls = [(name, call) for name, call in job.graph.calls.items() if isinstance(call, Function)]
    variables = {each: f"$.calls.{name}.env[{i}]" for name, call in calls for i, each in enumerate(call.env)}
    sums = {**job.data_sums, **job.eval_sums}
    return Needed(job.cluster, prepared.folder.root, tuple(_paths(job)), sums, variables, _alike(job))


def _alike(job: Job) -> dict[str, FileSum]:
    """The files that all hosts must have alike, of local models, data and functions. Raises ConfigError."""
    modules = {use.fn.partition(":")[0] for use in uses(job.graph.calls)}
    code = [Path(job.user_dir, *name.split(".")).with_suffix(".py") for name in sorted(modules)]
    folders = [Path(source) for source in _models(job) if Path(source).is_absolute()]
    weights = [file for folder in folders for kind in MODEL_FILES for file in sorted(folder.glob(kind))]
    data = [Path(file) for file in (*job.data_sums, *job.eval_sums)]
    return sampled_sums([*weights, *data, *filter(Path.is_file, code)])


def print_needs(launcher: Launcher, prepared: PreparedRun) -> None:
    """Have a launcher know what a run needs now: the checksums of its data, its newest plan."""
    if isinstance(launcher, HostsLauncher):
        launcher.start_again(needed_of(prepared))


def _in_allocation(
    spec: SlurmLaunch, prepared: PreparedRun, say: Callable[[str], None]
) -> tuple[str, int, AgentStarter]:
    """The address of this host that all nodes of its allocation reach, any port, and srun. Raises ConfigError where
    there is none, or the allocation has fewer nodes than the plan."""
    allocation = the_allocation(variables())
    wanted = sum(group.nodes for group in prepared.job.cluster.groups)
    if len(allocation.nodes) < wanted:
        text = f"the plan has {wanted} nodes, and job {allocation.job} has {len(allocation.nodes)}"
        hint = f"allocate more, or plan for these: cluster.nodes={len(allocation.nodes)}"
        raise ConfigError([Problem(Where(path="$.cluster.nodes"), text, hint, "slurm")])
    own = address_of_interface(spec.interface) if spec.interface else slurm.address_towards(allocation)
    return own, 0, agents_by_srun(len(allocation.nodes), prepared.folder.logs / "srun.log", say)


def _on_ray(spec: RayLaunch, prepared: PreparedRun, say: Callable[[str], None]) -> tuple[str, int, AgentStarter]:
    """The address of this host that all nodes of the cluster reach, any port, and Ray. Raises ConfigError where the
    cluster does not answer, asks for no token, or has too few nodes."""
    cluster, bundles = (
        RayCluster(spec.address, dict(variables()), spec.trusted_network),
        bundles_of(prepared.job.cluster),
    )
    nodes = cluster.nodes()
    check_room(nodes, bundles)
    own = address_of_interface(spec.interface) if spec.interface else address_towards(nodes)
    return own, 0, cluster.agents(bundles, prepared.folder.logs / "ray.log", say)


def _paths(job: Job) -> Iterator[str]:
    """The paths on this host that workers read; each of them looks for other names in the Hub."""
    found = [job.user_dir, job.data.path, *([job.eval.data.path] if job.eval is not None and job.eval.data else [])]
    for path in dict.fromkeys([*found, *_models(job)]):
        if (place := Path(path).expanduser()).exists():
            yield str(place.absolute())


def _models(job: Job) -> Iterator[str]:
    """Paths, or names in the Hub, of the models that roles start from."""
    for role in job.graph.models:
        with suppress(ConfigError):  # a role without a model of its own
            yield model_source(job.graph, role)[0]
