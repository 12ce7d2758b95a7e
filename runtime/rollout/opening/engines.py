"""Opens the engine of a replica: its server is started in the environment that has SGLang, or given as a URL."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from realgraph.graphs.errors import Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.request.engine_support import SGLANG
from realgraph.runtime.engine import Decode, RolloutLimits
from realgraph.runtime.generate.request_bounds import RequestBounds
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.models.building import DTYPES, empty_network, parse_config
from realgraph.runtime.models.weights import resolve, weight_specs
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.rollout.engine import EngineModel, SglangEngine
from realgraph.runtime.rollout.messages import Timeouts
from realgraph.runtime.rollout.opening.expected import Expected
from realgraph.runtime.rollout.opening.homes import GivenServer, OwnServer
from realgraph.runtime.rollout.server import Argument, ServerSpec
from realgraph.runtime.rollout.serving import ServerHome, ServingBounds

CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # SGLang would have as many ranks as the host has NUMA nodes, at most


def open_sglang(order: "EngineOrder", notify: Callable[[], None]) -> SglangEngine:
    """The engine of one replica, its server ready. Raises ConfigError, SglangError, OSError."""
    role, spec, source = order.role, order.rollout, resolve(order.path)
    config = parse_config(source)
    specs = weight_specs(empty_network(config, role.head, DTYPES[role.dtype]))
    expected = Expected(
        where=Where(path=spec.url_path(order.call, order.replica) if spec.urls else "$.rollout"),
        model_type=config.model_type,
        vocabulary=config.vocab_size,
        dtype=role.dtype,
        context=min(order.context, config.max_position_embeddings),
        positions=config.max_position_embeddings,
        tp=order.tp,
        ep=order.ep,
    )
    bounds = RequestBounds(config.vocab_size, config.max_position_embeddings, None, order.decode is not None)
    model = EngineModel(source, specs, bounds, order.device, order.decode)
    most = order.limits.max_running or SGLANG.max_running
    home: ServerHome
    timeouts = timeouts_of(order.deadline_seconds)
    if spec.urls:
        home = GivenServer(spec.urls_of(order.call)[order.replica], expected, order.start_seconds, timeouts)
    else:
        home = OwnServer(_server_spec(order, str(source), most), expected, timeouts)
    half = order.deadline_seconds / 2
    serving = ServingBounds(most, min(order.silent_seconds, half), half)
    return SglangEngine(model, home, order.folder / f"sglang-weights-{order.call}-{order.replica}", serving, notify)


class EngineOrder(NamedTuple):
    """All that opens the engine of one replica."""

    role: ModelRole
    path: str  # of its first weights
    rollout: RolloutSpec
    limits: RolloutLimits
    decode: Decode
    device: torch.device  # of the worker that heads the replica
    folder: Path  # for a log, and for links to weights
    call: str
    replica: int  # of the call
    worker: int  # that heads the replica
    context: int  # tokens of the longest prompt and response
    start_seconds: float
    silent_seconds: float  # without a token, at most
    deadline_seconds: float  # until the run is ended where no group is made, or an update not taken
    tp: int = 1  # ranks of the server
    ep: int = 1  # of them, those that experts are spread over; the rest cut each of them


def timeouts_of(deadline_seconds: float) -> Timeouts:
    """Deadlines of calls to a server by that of the run, at which a worker is named: the server is before, at half of
    it. A single answer may come later, and after an update, where others go on."""
    half, usual = deadline_seconds / 2, Timeouts()
    return Timeouts(
        connect_seconds=min(usual.connect_seconds, half),
        control_seconds=min(usual.control_seconds, half),
        update_seconds=half,
        answer_seconds=deadline_seconds + half,
    )


def _server_spec(order: EngineOrder, model: str, most: int) -> ServerSpec:
    """The order of a server; the user's arguments come before ours."""
    assert order.rollout.python is not None
    arguments: dict[str, Argument] = {
        "dtype": order.role.dtype,
        "max_running_requests": most,
        "incremental_streaming_output": True,
    }
    environment: dict[str, str] = {}
    if order.tp > 1:
        arguments["tp_size"] = order.tp
    if order.ep > 1:
        arguments["ep_size"] = order.ep
    if order.device.type == "cuda":
        arguments["base_gpu_id"] = order.device.index or 0  # the replica's other ranks have those behind it
    elif order.tp > 1 and CORES not in variables():
        environment[CORES] = rank_cores(order.worker, order.tp, sorted(os.sched_getaffinity(0)))
    return ServerSpec(
        python=order.rollout.python,
        model=model,
        version=0,
        log=str(order.folder / f"sglang-{order.call}-{order.replica}.log"),
        arguments={**arguments, **order.rollout.arguments_of(order.call)},
        start_seconds=order.start_seconds,
        environment=environment,
    )


def rank_cores(worker: int, tp: int, cores: Sequence[int]) -> str:
    """The cores of a server's ranks on CPUs as SGLang takes them: one for each, in turn over the workers of a run."""
    return "|".join(str(cores[(worker + rank) % len(cores)]) for rank in range(tp))
