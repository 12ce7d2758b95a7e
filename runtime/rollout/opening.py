"""Opens the engine of a replica: its server is started in the environment that has SGLang, or given as a URL. Says what
differs between a server and what the run needs, before it generates."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import ModelRole
from realgraph.planner.request.engine_support import SGLANG
from realgraph.runtime.engine import Decode, RolloutLimits
from realgraph.runtime.generate.request_bounds import RequestBounds
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.models.building import DTYPES, empty_network, parse_config
from realgraph.runtime.models.weights import resolve, weight_specs
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.engine import EngineModel, SglangEngine
from realgraph.runtime.rollout.errors import ServerUnreachable, SglangError
from realgraph.runtime.rollout.messages import ServedModel, ServerArguments, Timeouts
from realgraph.runtime.rollout.server import Argument, ServerProcess, ServerSpec
from realgraph.runtime.rollout.serving import ServedWeights, ServerHome, ServingBounds

CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # SGLang would have as many ranks as the host has NUMA nodes, at most
ASK_SECONDS = 0.5  # between two questions whether a server is back


class Expected(Struct, frozen=True):
    """The server that a run needs. path: of the run file, for messages."""

    path: str
    model_type: str
    vocabulary: int
    dtype: str
    context: int  # tokens of prompt and response
    positions: int  # of the model, where the server names no context
    tp: int = 1
    ep: int = 1


def differences(expected: Expected, served: ServedModel, server: ServerArguments) -> list[Problem]:
    """All in which a server is another than the run needs."""
    where, found = Where(path=expected.path), list[tuple[str, str]]()
    if served.model_type not in (None, expected.model_type):
        found.append(
            (f"serves a {served.model_type} model", f"expected {expected.model_type}: start it with that model")
        )
    vocabulary = _vocabulary(served.model_path)
    if vocabulary not in (None, expected.vocabulary):
        text = f"serves a model with a vocabulary of {vocabulary}"
        found.append((text, f"expected {expected.vocabulary}: start it with the model of the role"))
    if server.dtype not in (None, "auto", expected.dtype):
        hint = f"expected {expected.dtype}: start it with --dtype {expected.dtype}, or set the role's dtype"
        found.append((f"computes in {server.dtype}", hint))
    context = server.context_length or expected.positions
    if context < expected.context:
        hint = f"expected {expected.context}: start it with a longer --context-length, or lower batch.max_new_tokens"
        found.append((f"takes {context} tokens of prompt and response", hint))
    if server.tp_size != expected.tp:
        found.append((f"has {server.tp_size} tensor-parallel ranks", f"expected {expected.tp}, as the plan has it"))
    if server.ep_size != expected.ep:
        hint = f"expected {expected.ep}, as the plan has it: pin ep of the call in `allocation`"
        found.append((f"spreads experts over {server.ep_size} ranks", hint))
    for axis, size in (("data-parallel replicas", server.dp_size), ("pipeline stages", server.pp_size)):
        if size != 1:
            found.append((f"has {size} {axis}", "start one server a replica"))
    return [Problem(where, f"the SGLang server {text}", hint, "sglang") for text, hint in found]


def _vocabulary(model_path: str) -> int | None:
    """The size of a model folder's vocabulary; None where the folder can't be seen from here."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return None
    size = json.loads(file.read_bytes()).get("vocab_size")
    return size if isinstance(size, int) else None


async def check(client: SglangClient, expected: Expected) -> None:
    """Raises ConfigError with all that is wrong with a server."""
    problems = differences(expected, await client.model_info(), await client.server_info())
    if problems:
        raise ConfigError(problems)


def open_sglang(order: "EngineOrder", notify: Callable[[], None]) -> SglangEngine:
    """The engine of one replica, its server ready. Raises ConfigError, SglangError, OSError."""
    role, spec, source = order.role, order.rollout, resolve(order.path)
    config = parse_config(source)
    specs = weight_specs(empty_network(config, role.head, DTYPES[role.dtype]))
    expected = Expected(
        path=f"$.rollout.urls[{order.replica}]" if spec.urls else "$.rollout",
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
        home = GivenServer(spec.urls[order.replica], expected, order.start_seconds, timeouts)
    else:
        home = OwnServer(_server_spec(order, str(source), most), expected, timeouts)
    half = order.deadline_seconds / 2
    serving = ServingBounds(most, min(order.silent_seconds, half), half)
    return SglangEngine(model, home, order.folder / f"sglang-weights-{order.replica}", serving, notify)


class EngineOrder(NamedTuple):
    """All that opens the engine of one replica."""

    role: ModelRole
    path: str  # of its first weights
    rollout: RolloutSpec
    limits: RolloutLimits
    decode: Decode
    device: torch.device  # of the worker that heads the replica
    folder: Path  # for a log, and for links to weights
    replica: int
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
        environment[CORES] = rank_cores(order.replica, order.tp, sorted(os.sched_getaffinity(0)))
    return ServerSpec(
        python=order.rollout.python,
        model=model,
        version=0,
        log=str(order.folder / f"sglang-{order.replica}.log"),
        arguments={**arguments, **order.rollout.server_args},
        start_seconds=order.start_seconds,
        environment=environment,
    )


def rank_cores(replica: int, tp: int, cores: Sequence[int]) -> str:
    """The cores of a server's ranks on CPUs as SGLang takes them: one for each, in turn over the replicas."""
    return "|".join(str(cores[(replica * tp + rank) % len(cores)]) for rank in range(tp))


class OwnServer:
    """A server that is started, and started again where it has died."""

    def __init__(self, spec: ServerSpec, expected: Expected, timeouts: Timeouts) -> None:
        self._spec, self._expected, self._timeouts = spec, expected, timeouts
        self.process: ServerProcess | None = None

    async def reach(self, weights: ServedWeights, before: SglangClient | None) -> SglangClient:
        """See ServerHome."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)
        spec = msgspec.structs.replace(self._spec, model=weights.folder, version=weights.version)
        self.process = ServerProcess(spec)
        client = SglangClient(self.process.url, self.process.key, self._timeouts)
        await self.process.wait_ready(client)
        await check(client, self._expected)
        await client.open(weights.version)
        return client

    def close(self) -> None:
        """End it, and all that it has started."""
        if self.process is not None:
            self.process.stop()


class GivenServer:
    """A server that somebody else has started, on this host. Weights that it has from before are replaced."""

    def __init__(self, url: str, expected: Expected, patience: float, timeouts: Timeouts) -> None:
        """patience: seconds that it may be gone, or take to read its first weights."""
        self._url, self._expected, self._patience, self._timeouts = url, expected, patience, timeouts

    async def reach(self, weights: ServedWeights, before: SglangClient | None) -> SglangClient:
        """See ServerHome."""
        client = SglangClient(self._url, timeouts=self._timeouts)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await check(client, self._expected)
                break
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(ASK_SECONDS)
        await client.resume()  # a run that ended before may have left it paused
        await client.open(weights.version - 1)
        try:
            seconds = max(self._patience, self._timeouts.update_seconds)
            await client.update_from_disk(weights.folder, weights.version, seconds=seconds)
        except SglangError as error:
            hint = "it has to see the run's folders: start it on this host, as this user"
            raise ConfigError([Problem(Where(path=self._expected.path), str(error), hint, "sglang")]) from error
        return client

    def close(self) -> None:
        """Nothing: it is not ours."""
