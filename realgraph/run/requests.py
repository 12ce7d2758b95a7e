"""The planner's request for a checked run: all that it needs to know. Imports neither torch nor a search, and uses no
network but that of an allocation whose machines the run file leaves open."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, suggest
from realgraph.graphs.spec import Generate, Train
from realgraph.planner.costs.lengths import quantiles
from realgraph.planner.inputs.allocated import cluster_from, is_whole
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import AUTO, CPU, Probe, probe, resolve
from realgraph.planner.inputs.model_configs import load_model_spec
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.constraints import constraint_problems, server_meshes
from realgraph.planner.plan.plan import Transport
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.engine_support import SGLANG_KIND, EngineSupport, run_support
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.run_file.compose import Checked
from realgraph.run_file.local_data import first_rows
from realgraph.runtime.clusters.machines import Machine, machines_of
from realgraph.runtime.clusters.ray_cluster import RayCluster
from realgraph.runtime.clusters.slurm import the_allocation
from realgraph.runtime.data.columns import column_names, value_at
from realgraph.runtime.data.row_files import data_files
from realgraph.runtime.job.launch import HostsLaunch, LaunchSpec, LocalLaunch, RayLaunch, SlurmLaunch
from realgraph.runtime.job.rollout import RolloutSpec, argument_name
from realgraph.runtime.processes.environment import variables

TAKE_EXPERTS = "take a Qwen3-MoE, Mixtral, gpt-oss or DeepSeek-V3 model"
MOST_SAMPLES = 1 << 30  # of a step
TRIED_ROWS = 256  # of the data, to guess the mean length of a prompt
CHARACTERS_PER_TOKEN = 4  # of English text under a vocabulary of 32,000 or more
# of a number in a server's cache, by its `kv_cache_dtype`; others are as the role's dtype
CACHE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}
SMALL_VOCABULARY = 2000  # with fewer tokens a token is about a character


class RequestOptions(Struct, frozen=True):
    """Options of planning beside the run file."""

    costs: CostTable = CostTable()  # measured
    lengths: tuple[int, ...] = ()  # measured new tokens of samples, in any order; they come before those of `costs`
    costs_file: str = ""  # where `costs` come from, for messages
    costs_option: str = "--costs"  # the option that named it, for messages


def request_for(
    checked: Checked, hub_cache: Path | None = None, asked: RequestOptions = RequestOptions()
) -> PlanRequest:
    """The planner's request for a run. hub_cache: the Hugging Face cache's `hub` folder, by default that of its tools.

    Raises ConfigError where a model's shape or the cluster is unknown, or a sample is longer than a model's positions.
    """
    cache = hub_cache or hub_cache_folder(variables())
    problems: list[Problem] = []
    models: dict[str, ModelSpec] = {}
    tried: set[tuple[str, str | None]] = set()  # a role that starts from another has its path
    for name, role in checked.graph.models.items():
        where = checked.where(f"$.models.{name}.path")
        if role.path is None:
            problems.append(
                Problem(where, f"role {name!r} has no model", "give its path: a directory or Hub id", "model")
            )
            continue
        try:
            models[name] = load_model_spec(role.path, where, cache, role.revision)
        except ConfigError as error:
            problems += error.problems if (role.path, role.revision) not in tried else ()
        tried.add((role.path, role.revision))
    workload = with_lengths(workload_of(checked, models), asked.lengths or asked.costs.lengths)
    problems += [*_no_room(checked, models, workload), *_too_many(checked, workload)]
    engine = run_support(checked.run.rollout.engine)
    problems += [*without_routes(checked, models, engine), *without_experts(checked, models)]
    problems += _server_problems(checked)
    try:
        cluster = cluster_of(checked.run.cluster, checked.run.launch)
    except ConfigError as error:
        problems += error.problems
        raise ConfigError(placed(checked, problem) for problem in problems) from None
    if problems:
        raise ConfigError(problems)
    if spread := _spread(checked, cluster):
        raise ConfigError([spread])
    engine = engine_of(checked.run.rollout, cluster)
    pinned = {name: pin for name, pin in checked.run.allocation.items() if name in checked.graph.calls}
    return PlanRequest(
        graph=checked.graph,
        workload=workload,
        cluster=cluster,
        models=models,
        pins={name: _of_servers(checked, name, pin) for name, pin in pinned.items()},
        engine=engine,
        costs=_costs_for(cluster, asked, checked.where("$.cluster.kind")),
        constraints=checked.run.constraints,
        memory=checked.run.memory,
    )


def refuse_unplannable(checked: Checked) -> None:
    """Refuse what no plan of the run can be, as far as that is known without a search and without looking at machines:
    nothing where the cluster is left to these, or where the shape of a model of the Hub is not at hand. Raises
    ConfigError."""
    if not is_whole(checked.run.cluster):
        return
    models = checked.graph.models.items()
    of_hub = {f"$.models.{name}.path" for name, role in models if not Path(role.path or "").is_absolute()}
    try:
        request = request_for(checked)
    except ConfigError as error:
        problems = [problem for problem in error.problems if problem.where.path not in of_hub]
    else:
        if any(name not in server_meshes(request) for name in request.graph.generates):  # the search places servers
            engine = msgspec.structs.replace(request.engine, own_devices=False)
            request = msgspec.structs.replace(request, engine=engine)
        problems = [placed(checked, problem) for problem in constraint_problems(request)]
    if problems:
        raise ConfigError(sorted(problems))


def with_lengths(workload: Workload, measured: Sequence[int]) -> Workload:
    """The workload with measured new tokens of samples instead of a guessed mean; cut at the longest response."""
    if not measured:
        return workload
    cut = sorted(max(1, min(length, workload.max_new_tokens)) for length in measured)
    mean = math.fsum(cut) / len(cut)
    return msgspec.structs.replace(workload, lengths=quantiles(cut), mean_new_tokens=mean)


def _costs_for(cluster: Cluster, asked: RequestOptions, where: Where) -> CostTable:
    """The table where it speaks of a kind that the cluster has. Raises ConfigError where it does not."""
    costs, kinds = asked.costs, sorted({group.kind for group in cluster.groups})
    if costs.kind and costs.kind not in kinds:
        whose = f"the costs in {asked.costs_file}" if asked.costs_file else "the costs"
        text = f"{whose} were measured on {costs.kind}, the cluster has {', '.join(kinds)}"
        raise ConfigError([Problem(where, text, f"measure this kind, or leave {asked.costs_option} out", "costs")])
    return costs


def hub_cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of huggingface_hub's models, by its own rules (constants.py), so that planner and runtime agree."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    given = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(given or f"{home}/hub").expanduser()


def workload_of(checked: Checked, models: dict[str, ModelSpec]) -> Workload:
    """The run's step. Prompts are as long as the run allows and the models have positions for."""
    run = checked.run
    generates = [checked.graph.calls[name] for name in checked.graph.generates]
    limit = run.batch.max_new_tokens
    most = [call.most_new_tokens(limit) for call in generates if isinstance(call, Generate)]
    longest = max(most, default=limit)
    own = most[0] if most else limit  # of the call that makes the samples of a group
    expected = min(run.batch.expected_new_tokens or (own + 1) // 2, own)
    positions = [model.max_positions - longest for model in models.values() if model.max_positions > longest]
    prompt = min([run.data.max_prompt_tokens, *positions])
    return Workload(
        groups=run.batch.groups,
        samples_per_group=checked.graph.samples_per_group,
        prompt_tokens=prompt,
        max_new_tokens=longest,
        mean_new_tokens=float(expected),
        staleness=run.staleness,
        max_tokens_per_microbatch=run.batch.max_tokens_per_microbatch,
        mean_prompt_tokens=_mean_prompt_tokens(checked, models, prompt),
        max_running=run.rollout.max_running,
    )


def _mean_prompt_tokens(checked: Checked, models: dict[str, ModelSpec], longest: int) -> float:
    """A guess from the characters of the first rows of local JSON lines or CSV; else, a quarter of the longest."""
    column, files = checked.run.data.columns.get("prompt", "prompt"), data_files(checked.run.data)
    rows = first_rows(files[0], TRIED_ROWS, checked.where("$.data.path")) if files else ()
    values = [value_at(row, column) for row in rows if column in column_names(row)]
    lengths = [min(longest, characters) for value in values for characters in _characters(value)]
    if not lengths:
        return max(1.0, longest / 4)
    smallest = min((model.vocab for model in models.values()), default=SMALL_VOCABULARY)
    per_token = 1 if smallest < SMALL_VOCABULARY else CHARACTERS_PER_TOKEN
    return max(1.0, math.fsum(lengths) / len(lengths) / per_token)


def _characters(value: object) -> Iterator[int]:
    """Characters of a text, or of all messages of a chat; nothing of what holds no text."""
    messages = value if isinstance(value, list) else [{"content": value}]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    if any(isinstance(content, str) for content in contents):
        yield sum(len(content) for content in contents if isinstance(content, str))


def cluster_of(spec: ClusterSpec, launch: LaunchSpec = LocalLaunch()) -> Cluster:
    """The resolved cluster. The machines of an allocation, or this one, are looked at only where the spec leaves
    something to them. Raises ConfigError."""
    machines = () if is_whole(spec) else _machines(launch)
    if machines:
        spec = cluster_from(spec, [(machine.name, machine.has) for machine in machines])
    kinds = (spec.kind, *(more.kind for more in spec.more))
    looks = AUTO in kinds or CPU in kinds or spec.devices is None
    return resolve(spec, probe() if looks else Probe(cores=1, host_memory_bytes=0))


def _machines(launch: LaunchSpec) -> tuple[Machine, ...]:
    """The nodes that a launcher has by itself; none where a user names them. Raises ConfigError."""
    match launch:
        case SlurmLaunch():
            return machines_of(the_allocation(variables()))
        case RayLaunch():
            return RayCluster(launch.address, dict(variables()), launch.trusted_network).machines()
        case LocalLaunch() | HostsLaunch():
            return ()


def _no_room(checked: Checked, models: dict[str, ModelSpec], workload: Workload) -> list[Problem]:
    """Responses that leave no position for a prompt."""
    return [
        Problem(
            checked.where("$.batch.max_new_tokens"),
            f"a response may have {workload.max_new_tokens} tokens, "
            f"but the model of role {name!r} has {model.max_positions} positions for prompt and response",
            "lower batch.max_new_tokens, or take a model with more positions",
            "positions",
        )
        for name, model in models.items()
        if 0 < model.max_positions <= workload.max_new_tokens
    ]


def without_experts(checked: Checked, models: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    """Terms that balance the load of experts, of models that have none."""
    for name, call in checked.graph.calls.items():
        model = models.get(call.model) if isinstance(call, Train) else None
        if not isinstance(call, Train) or model is None or model.expert_layers:
            continue
        for entry, term in call.loss.terms.items():
            if term.of_routes:
                text = f"load_balance is for mixtures of experts, and the model of {call.model!r} is none"
                hint = f"leave it out, or {TAKE_EXPERTS}"
                yield Problem(checked.where(f"$.calls.{name}.loss.terms.{entry}"), text, hint, "load_balance")


def without_routes(checked: Checked, models: Mapping[str, ModelSpec], engine: EngineSupport) -> Iterator[Problem]:
    """Roles that are to be trained with the experts that generation chose, where it chooses none or does not tell."""
    for name, role in checked.graph.models.items():
        if not role.routing_replay or name not in models:
            continue
        where = checked.where(f"$.models.{name}.routing_replay")
        if not models[name].expert_layers:
            text = f"routing_replay is for mixtures of experts, and {role.path} ({models[name].architecture}) is none"
            yield Problem(where, text, f"leave it out, or {TAKE_EXPERTS}", "routing_replay")
        elif not engine.records_routes:
            text = f"{engine.name} do not tell which experts a token went to, so there is nothing to replay"
            yield Problem(where, text, "leave it out, or generate with the embedded engine", "routing_replay")


def _server_problems(checked: Checked) -> Iterator[Problem]:
    """Faults of a graph that SGLang servers can't generate for, and of URLs that are not as many as devices."""
    rollout, graph = checked.run.rollout, checked.graph
    if rollout.engine != SGLANG_KIND:
        return
    generates = {name: call for name, call in graph.calls.items() if isinstance(call, Generate)}
    if not generates:
        hint = "leave rollout.engine out"
        yield Problem(checked.where("$.rollout.engine"), f"the graph {graph.name!r} generates nothing", hint, "sglang")
    for name, call in generates.items():
        for key, cuts in (("top_p", call.top_p < 1), ("top_k", call.top_k > 0)):
            if cuts and call.temperature > 0:
                text = f"SGLang gives log-probabilities without {key}, which are not those that tokens are drawn with"
                hint = f"leave {key} out, or generate with the embedded engine"
                yield Problem(checked.where(f"$.calls.{name}.{key}"), text, hint, "sglang")
        pin, n = checked.run.allocation.get(name, Pin()), len(rollout.urls_of(name))
        if n and pin.devices is None:
            text = f"servers are given for {name!r}, and nothing says which devices they have"
            hint = f"pin them, such as allocation: {{{name}: {{first: {n}, devices: {n}}}}}"
            yield Problem(checked.where(f"$.allocation.{name}"), text, hint, "sglang")
        replicas = pin.dp or (pin.devices // pin.tp if pin.devices and pin.tp else n)
        if n and pin.devices is not None and (pin.devices % n or replicas != n):
            text = f"{name!r} has {pin.devices} devices, and {n} servers are given"
            where = checked.where(f"$.rollout.urls.{name}" if isinstance(rollout.urls, dict) else "$.rollout.urls")
            yield Problem(where, text, "give one for each dp replica of the call", "sglang")
    yield from _misplaced_servers(checked, tuple(generates))


def _misplaced_servers(checked: Checked, generates: Sequence[str]) -> Iterator[Problem]:
    """Servers and their arguments that are given for no call of the graph, and generate calls that none is given
    for."""
    urls, where = checked.run.rollout.urls, checked.where("$.rollout.urls")
    by_call: tuple[tuple[str, Iterable[str]], ...] = (
        ("urls", urls if isinstance(urls, dict) else ()),
        ("call_args", checked.run.rollout.call_args),
    )
    for place, name in ((place, name) for place, given in by_call for name in given if name not in generates):
        hint = suggest(name, generates)
        yield Problem(checked.where(f"$.rollout.{place}.{name}"), f"{name!r} is no generate call", hint, "sglang")
    if not isinstance(urls, dict):
        if urls and len(generates) > 1:
            text = f"the graph generates in {', '.join(generates)}, and nothing says which servers are whose"
            hint = f"name the call of each: {{{', '.join(f'{name}: [URL]' for name in generates)}}}"
            yield Problem(where, text, hint, "sglang")
        return
    for name in generates:
        if urls and not urls.get(name):
            yield Problem(where, f"no server is given for {name!r}", f"add {name}: [URL]", "sglang")


def engine_of(rollout: RolloutSpec, cluster: Cluster) -> EngineSupport:
    """The abilities of a run's engines: those of its kind, as `rollout` and the cluster bound them."""
    support = run_support(rollout.engine)
    if rollout.engine != SGLANG_KIND:
        return support
    arguments = {argument_name(name): value for name, value in rollout.server_args.items()}
    nbytes = CACHE_BYTES.get(str(arguments.get("kv_cache_dtype", "auto")))
    return msgspec.structs.replace(support, generate_transports=_ways(rollout, cluster), cache_bytes=nbytes)


def _of_servers(checked: Checked, name: str, pin: Pin) -> Pin:
    """The pin of a generate call whose servers are given: one for each replica, the devices shared out among them."""
    urls = checked.run.rollout.urls_of(name)
    if not urls or not isinstance(checked.graph.calls[name], Generate) or pin.devices is None:
        return pin
    return msgspec.structs.replace(pin, dp=len(urls), tp=pin.devices // len(urls))


def _ways(rollout: RolloutSpec, cluster: Cluster) -> tuple[Transport, ...]:
    """Ways of new weights to servers: by broadcast between devices, or by files in the host's memory.

    On CPUs the plan never broadcasts of its own accord: gloo copies over sockets what the other way maps.
    """
    if rollout.weights == "broadcast":
        return ("device",)
    broadcasts = rollout.weights == "auto" and not rollout.urls and not cluster.is_cpu and cluster.nodes == 1
    return ("device", "host") if broadcasts else ("host",)


def _spread(checked: Checked, cluster: Cluster) -> Problem | None:
    """Broadcasts that would leave their host."""
    if checked.run.rollout.weights != "broadcast" or cluster.nodes == 1:
        return None
    text = f"weights are broadcast on one host only, and the cluster has {cluster.nodes}"
    return Problem(checked.where("$.rollout.weights"), text, "leave it out: servers read them from disk", "sglang")


def _too_many(checked: Checked, workload: Workload) -> Iterator[Problem]:
    """A step that no cluster ends, whose seconds would drown those of all else."""
    if workload.n_samples > MOST_SAMPLES:
        text = f"a step of {workload.n_samples:,} samples: at most {MOST_SAMPLES:,} can be planned"
        yield Problem(checked.where("$.batch.groups"), text, "lower batch.groups, or the samples of a group", "batch")


def placed(checked: Checked, problem: Problem) -> Problem:
    """The planner knows paths of the run file, not its lines."""
    if problem.where.file:
        return problem
    return msgspec.structs.replace(problem, where=checked.where(problem.where.path))
