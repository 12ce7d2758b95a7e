"""The run that a rehearsal is: the same graph over toy models, made data and short samples, in float64 on CPUs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Function, Generate, ModelCall, ModelRole
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import CPU
from realgraph.planner.inputs.model_configs import load_config
from realgraph.planner.request.constraints import Constraints
from realgraph.rehearsal.models import ToyModel, toy_config
from realgraph.rehearsal.rows import made_rows, typical_tokens, write_rows
from realgraph.rehearsal.scale import ToyScale
from realgraph.rehearsal.texts import real_rows
from realgraph.run.requests import hub_cache_folder
from realgraph.run_file.compose import Checked
from realgraph.runtime.job.job import BatchSpec, CheckpointSpec, DataSpec, OutputSpec
from realgraph.runtime.processes.environment import variables

SCORE, ASK = "realgraph.rehearsal.functions:score", "realgraph.rehearsal.functions:ask"
STEPS = 2
THREADS = 1
MEMORY_GB = 4.0  # of a process: what a toy takes is not what a rehearsal asks about
LEAST_PATIENCE_SECONDS = 600.0  # of a call
PATIENCE_SECONDS = 100.0  # of a call for each process that a core has
MORE_ROWS = 2  # than a step has


class ToyRun(Struct, frozen=True):
    """The rehearsal of a run, the models that it needs, where its data come from, in words, and the tokens of one of
    its samples."""

    checked: Checked
    models: tuple[ToyModel, ...]
    data: str
    typical: float


def toy_run(checked: Checked, scale: ToyScale, home: Path) -> ToyRun:
    """The rehearsal of a run, with its data written to `home`, where its models are to be. Raises ConfigError, OSError.

    What binds the plan alone (allocation, constraints) is left out: the plan is given.
    """
    run = checked.run
    toys, models = _toy_models(checked, scale, home)
    prompt, response = scale.shortened(scale.prompt), scale.shortened(scale.response)
    data = home / "data.jsonl"
    n_rows = scale.toy_groups * MORE_ROWS
    rows = real_rows(run.data, checked.graph, scale, n_rows)
    note = f"data: the first {len(rows)} rows of {run.data.path} that are not too long, by the model's tokenizer"
    if not rows:
        rows = made_rows(checked.graph, n_rows, prompt, response, run.seed)
        note = f"data: made, as {run.data.path} or the model's tokenizer is not here"
    write_rows(data, rows)
    expected = run.batch.expected_new_tokens
    batch = BatchSpec(
        groups=scale.toy_groups,
        max_new_tokens=scale.shortened(run.batch.max_new_tokens),
        expected_new_tokens=None if expected is None else min(response, scale.shortened(expected)),
    )
    small = replace(
        run,
        data=DataSpec(str(data), max_prompt_tokens=prompt, chat=False, truncated=run.data.truncated),
        batch=batch,
        models=models,
        allocation={},
        constraints=Constraints(),
        steps=STEPS,
        eval=None,
        rollout=replace(
            run.rollout, engine="embedded", python=None, urls=(), server_args={}, call_args={}, weights="auto"
        ),
        checkpoint=CheckpointSpec(every=STEPS),
        outputs=OutputSpec(),
        runtime=replace(run.runtime, threads=THREADS),
    )
    graph = replace(checked.graph, models=models, calls=_toy_calls(checked.graph, scale))
    typical = typical_tokens(checked.graph, rows, scale.sample)
    return ToyRun(replace(checked, run=small, graph=graph), tuple(toys), note, typical)


def on_cluster(checked: Checked, cluster: Cluster | None) -> Checked:
    """The rehearsal on as many processes as the cluster has devices, in as many nodes; None: on one process.

    The more of them a core has, the longer a call may take.
    """
    uniform = cluster is not None and not cluster.more
    devices = 1 if cluster is None else cluster.devices_per_node if uniform else cluster.n_devices
    nodes = cluster.nodes if cluster is not None and uniform else 1
    host_memory = MEMORY_GB * devices
    spec = ClusterSpec(nodes, devices, CPU, memory_gb=MEMORY_GB, host_memory_gb=host_memory)
    patience = max(LEAST_PATIENCE_SECONDS, PATIENCE_SECONDS * nodes * devices / (os.cpu_count() or 1))
    runtime = replace(
        checked.run.runtime, min_deadline_seconds=patience, start_seconds=patience, lost_after_seconds=patience
    )
    return replace(checked, run=replace(checked.run, cluster=spec, runtime=runtime))


def _toy_models(checked: Checked, scale: ToyScale, home: Path) -> tuple[list[ToyModel], dict[str, ModelRole]]:
    """A toy model for each model that the run has, and the roles with these in the place of theirs."""
    toys: dict[tuple[str | None, str | None, bool], ToyModel] = {}
    roles = {}
    for name, role in checked.graph.models.items():
        scores = role.head != "lm" and not (role.trainable or role.ema_rate or role.init)
        key = (role.path, role.revision, scores)
        if key not in toys:
            config = toy_config(_config_of(checked, name, role), scale.sample + 1, scale.factor)
            folder = str(home / f"model-{len(toys)}")
            toys[key] = ToyModel(folder, config, checked.run.seed + len(toys) + 1, scores)
        roles[name] = replace(role, path=toys[key].folder, revision=None, dtype="float64", master_dtype=None)
    return list(toys.values()), roles


def _config_of(checked: Checked, name: str, role: ModelRole) -> Mapping[str, Any]:
    where = checked.where(f"$.models.{name}.path")
    return load_config(str(role.path), where, hub_cache_folder(variables()), role.revision)


def _toy_calls(graph: Graph, scale: ToyScale) -> dict[str, ModelCall]:
    """The calls with shorter responses, short prompts where a function writes them, and a reward that random texts earn
    in the place of one for a sample's text."""
    calls: dict[str, ModelCall] = {}
    for name, call in graph.calls.items():
        match call:
            case Generate(max_new_tokens=int(tokens)):
                calls[name] = replace(call, max_new_tokens=scale.shortened(tokens))
            case Function(over="sample") if _asks(graph, name):
                calls[name] = replace(call, fn=ASK, args={"length": scale.shortened(scale.prompt)}, ids=(), env=())
            case Function(over="sample", reads=reads) if "text" in reads and _scores(graph, name):
                calls[name] = replace(call, fn=SCORE, args={}, ids=(), env=())
            case _:
                calls[name] = call
    return calls


def _asks(graph: Graph, call: str) -> bool:
    """True where a call writes the text that a generate call has as its prompt."""
    prompts = {key for name in graph.generates for key in graph.reads[name]}
    return any(key in prompts and graph.keys[key].type.dtype == "text" for key in graph.writes[call])


def _scores(graph: Graph, call: str) -> bool:
    """True where a call writes one number a sample."""
    kinds = [graph.keys[key].type for key in graph.writes[call]]
    return [(kind.level, kind.dtype) for kind in kinds] == [("sample", "float32")]
