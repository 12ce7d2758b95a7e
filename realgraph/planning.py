"""From a checked run to a plan: gathers what the planner needs to know. Imports no torch and uses no network."""

from pathlib import Path

import msgspec

from realgraph.compose import Checked
from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.spec import Generate
from realgraph.planner.cluster import Cluster, ClusterSpec
from realgraph.planner.codec import plan_from_json
from realgraph.planner.detect import AUTO, CPU, Probe, probe, resolve
from realgraph.planner.model_spec import ModelSpec, load_model_spec
from realgraph.planner.plan import Plan
from realgraph.planner.request import PlanRequest
from realgraph.planner.search import reprice, search
from realgraph.planner.validate import validate
from realgraph.planner.workload import Workload

HUB_CACHE = Path("~/.cache/huggingface/hub")


def request_for(checked: Checked, hub_cache: Path | None = None) -> PlanRequest:
    """What to plan for a run. hub_cache: the Hugging Face cache's `hub` folder, by default the usual one.

    Raises ConfigError where a model's shape or the cluster is unknown, or a sample is longer than a model's positions.
    """
    cache = (hub_cache or HUB_CACHE).expanduser()
    problems: list[Problem] = []
    models: dict[str, ModelSpec] = {}
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
            problems += error.problems
    workload = workload_of(checked)
    problems += _too_long(checked, models, workload)
    try:
        cluster = cluster_of(checked.run.cluster)
    except ConfigError as error:
        problems += error.problems
        raise ConfigError(_placed(checked, problem) for problem in problems) from None
    if problems:
        raise ConfigError(problems)
    pins = {name: pin for name, pin in checked.run.allocation.items() if name in checked.graph.calls}
    return PlanRequest(checked.graph, workload, cluster, models, pins)


def workload_of(checked: Checked) -> Workload:
    """The run's step, with the longest prompts its data may bring. A graph that generates nothing trains on rows."""
    run = checked.run
    generates = [call for call in checked.graph.calls.values() if isinstance(call, Generate)]
    longest = max((call.max_new_tokens or run.batch.max_new_tokens for call in generates), default=0)
    expected = min(run.batch.expected_new_tokens or (longest + 1) // 2, longest)
    return Workload(
        groups=run.batch.groups,
        samples_per_group=checked.graph.samples_per_group,
        prompt_tokens=run.data.max_prompt_tokens,
        max_new_tokens=longest,
        mean_new_tokens=float(expected),
        staleness=run.staleness,
        max_tokens_per_microbatch=run.batch.max_tokens_per_microbatch,
        max_running=run.batch.max_running,
    )


def cluster_of(spec: ClusterSpec) -> Cluster:
    """The resolved cluster. This machine is looked at only where the spec leaves something to it."""
    looks = spec.kind in (AUTO, CPU) or spec.devices is None
    return resolve(spec, probe() if looks else Probe(cores=1, host_memory_bytes=0))


def plan_for(checked: Checked, request: PlanRequest) -> Plan:
    """The planner's choice. Raises ConfigError, placed in the user's files."""
    try:
        return search(request)
    except ConfigError as error:
        raise ConfigError(_placed(checked, problem) for problem in error.problems) from None


def read_plan(file: Path, request: PlanRequest) -> Plan:
    """A plan that may have been edited by hand, with its predictions computed anew.

    Raises ConfigError with every reason why it can't run what `request` asks.
    """
    plan = plan_from_json(file.read_text(encoding="utf-8"), str(file))
    problems = validate(plan, request, str(file))
    if problems:
        raise ConfigError(problems)
    return reprice(request, plan)


def _too_long(checked: Checked, models: dict[str, ModelSpec], workload: Workload) -> list[Problem]:
    """Samples that have no position in a model."""
    longest = workload.prompt_tokens + workload.max_new_tokens
    return [
        Problem(
            checked.where("$.batch.max_new_tokens"),
            f"a sample may have {workload.prompt_tokens} prompt and {workload.max_new_tokens} new tokens, "
            f"but the model of role {name!r} has {model.max_positions} positions",
            f"lower data.max_prompt_tokens or batch.max_new_tokens to {model.max_positions} in all",
            "positions",
        )
        for name, model in models.items()
        if 0 < model.max_positions < longest
    ]


def _placed(checked: Checked, problem: Problem) -> Problem:
    """The planner knows paths of the run file, not its lines."""
    if problem.where.file:
        return problem
    return msgspec.structs.replace(problem, where=checked.where(problem.where.path))
