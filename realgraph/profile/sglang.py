"""Decode steps of an SGLang server that is running already, for `realgraph profile --sglang URL`. Starts no server.

Two answers of different length to the same prompts, whose keys and values the server has kept, differ by decode steps
alone: seconds of a step are the difference over the difference in tokens. All requests of a batch go in one message.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import ModelRole
from realgraph.graphs.yaml.document import COMMAND_LINE
from realgraph.planner.costs.backend import Backend
from realgraph.planner.costs.calibrate.calibrate import Point, fit_costs
from realgraph.planner.costs.calibrate.fit_profile import DECODING_FACTORS, Stage
from realgraph.planner.costs.generate.decode import decode_step
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors
from realgraph.planner.inputs.model_configs import load_model_spec
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.run.requests import hub_cache_folder
from realgraph.runtime.processes.environment import variables

SIZES = ((1, 512), (8, 512), (64, 512), (256, 512), (8, 4096), (64, 4096))  # sequences, tokens of context
SHORT_TOKENS, LONG_TOKENS = 8, 40  # new tokens of the two answers
REPEATS = 3
REQUEST_SECONDS = 300.0
FIRST_TOKEN, N_PROMPT_TOKENS = 1000, 997  # prompts are made of these, or of those that a smaller vocabulary has


Answered = TypeVar("Answered")


class ModelInfo(Struct):
    """The fields of /get_model_info that are read."""

    model_path: str


class ServerInfo(Struct):
    """The fields of /get_server_info that are read; null where the server was started without it."""

    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_req_input_len: int | None = None
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None


class Finished(Struct):
    completion_tokens: int


class GenerateReply(Struct):
    """The fields of one answer of /generate that are read."""

    meta_info: Finished


class SGLangServer(Struct, frozen=True):
    """A server as it describes itself."""

    url: str
    model: ModelSpec
    tp: int
    longest: int  # tokens of a request
    most_running: int = 1 << 30  # requests that decode at once
    most_tokens: int = 1 << 62  # of all that run, in its cache
    weight_bytes: int | None = None  # of a weight, None: as in the role's dtype
    cache_bytes: int | None = None  # of a number in the cache, None: as in the role's dtype


def sglang_costs(costs: EfficiencyFactors, server: SGLangServer, cluster: Cluster) -> tuple[EfficiencyFactors, Stage]:
    """`costs` with the decode steps of the server instead of the embedded engine's. Raises ConfigError."""
    points = list(_points(costs, server, cluster))
    if not points:
        least, longest = min(context for _, context in SIZES) + LONG_TOKENS, min(server.longest, server.most_tokens)
        text = f"the server takes requests of {longest} tokens at most, the shortest measured here has {least}"
        raise _error(server.url, text, "start it with a longer --context-length, or a larger --max-total-tokens")
    fit = fit_costs(costs, DECODING_FACTORS, points)
    return fit.costs, Stage("decoding by SGLang", DECODING_FACTORS, fit.error, len(points))


def open_server(url: str) -> SGLangServer:
    """Ask the server what it runs. Raises ConfigError where it can't be reached, or can't be priced."""
    base, parts = url.rstrip("/"), urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        where = Where(COMMAND_LINE, path="--sglang")
        raise ConfigError([Problem(where, f"{url!r} is no address of a server", "such as http://127.0.0.1:30000")])
    info, args = _ask(base, "/get_model_info", ModelInfo), _ask(base, "/get_server_info", ServerInfo)
    model = load_model_spec(info.model_path, Where(base), hub_cache_folder(variables()))
    if (args.pp_size or 1) > 1 or (args.dp_size or 1) > 1:
        raise _error(base, "the server has several pipeline stages or replicas", "start one with --tp-size alone")
    weights, cache = args.quantization or "", args.kv_cache_dtype or "auto"
    if weights and "fp8" not in weights:
        raise _error(
            base, f"weights quantized by {weights!r} have no formula", "start a server with bf16 or fp8 weights"
        )
    longest = args.max_req_input_len or model.max_positions or max(length for _, length in SIZES)
    weight_bytes, cache_bytes = (1 if "fp8" in form else None for form in (weights, cache))
    bounds = (args.max_running_requests or 1 << 30, args.max_total_num_tokens or 1 << 62)
    return SGLangServer(base, model, args.tp_size or 1, longest, *bounds, weight_bytes, cache_bytes)


def _points(base: EfficiencyFactors, server: SGLangServer, cluster: Cluster) -> Iterator[Point]:
    layout = Layout(DeviceMesh(0, server.tp), tp=server.tp)
    role = ModelRole(dtype="float32" if cluster.is_cpu else "bfloat16")
    speedup = base.fp8 if server.weight_bytes == 1 else 1.0
    engine = Backend(
        "sglang", product_speedup=speedup, weight_bytes=server.weight_bytes, cache_bytes=server.cache_bytes
    )
    for running, context in SIZES:
        if not holds(server, running, context):
            continue
        unfitted = Setting(server.model, role, layout, cluster, backend=engine)

        def predict(
            costs: EfficiencyFactors, running: int = running, context: int = context, unfitted: Setting = unfitted
        ) -> float:
            setting = msgspec.structs.replace(unfitted, factors=costs)
            return decode_step(setting).seconds(running, context + (SHORT_TOKENS + LONG_TOKENS) / 2)

        yield Point(predict, step_seconds(server, running, context))


def step_seconds(server: SGLangServer, running: int, context: int) -> float:
    """Least seconds of one decode step of `running` sequences. Raises ConfigError."""
    prompts = [prompt(number, context, server.model.vocab) for number in range(running)]
    _generate(server, prompts, 1)  # the server keeps the prompts' keys and values
    short = min(_generate(server, prompts, SHORT_TOKENS) for _ in range(REPEATS))
    long = min(_generate(server, prompts, LONG_TOKENS) for _ in range(REPEATS))
    if long <= short:
        text = f"{LONG_TOKENS} tokens for {running} sequences took no longer than {SHORT_TOKENS}: {long:.3f} s"
        raise _error(server.url, text, "is something else using the server?")
    return (long - short) / (LONG_TOKENS - SHORT_TOKENS)


def holds(server: SGLangServer, running: int, context: int) -> bool:
    """True where so many sequences fit the server at once: others would wait, and their steps be told apart by none."""
    length = context + LONG_TOKENS
    return length <= server.longest and running <= server.most_running and running * length <= server.most_tokens


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Tokens that begin differently for each number, so that no two share what the server keeps."""
    first = FIRST_TOKEN if vocabulary >= FIRST_TOKEN + N_PROMPT_TOKENS else 0
    n = min(N_PROMPT_TOKENS, vocabulary)
    return [first + (number + 31 * number * i + i) % n for i in range(length)]


def _generate(server: SGLangServer, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Seconds until all answers of exactly `new` tokens are there."""
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0}
    began = time.perf_counter()
    asked = {"input_ids": prompts, "sampling_params": sampling}
    answers = _ask(server.url, "/generate", list[GenerateReply], asked)
    seconds = time.perf_counter() - began
    counts = {answer.meta_info.completion_tokens for answer in answers}
    if len(answers) != len(prompts) or counts != {new}:
        text = f"{len(prompts)} requests for {new} tokens got {len(answers)} answers of {sorted(counts)}"
        raise _error(server.url, text, "expected /generate of SGLang 0.4 or later")
    return seconds


def _ask(url: str, path: str, kind: type[Answered], body: object = None) -> Answered:
    """The decoded answer. Raises ConfigError."""
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with _direct().open(request, timeout=REQUEST_SECONDS) as answer:
            return msgspec.json.decode(answer.read(), type=kind)
    except urllib.error.HTTPError as error:
        full = "it has no place for that many requests at once: start it without --max-queued-requests"
        hint = full if error.code == HTTPStatus.SERVICE_UNAVAILABLE else "is this an SGLang server?"
        raise _error(url, f"{path} answered {error.code} {error.reason}", hint) from error
    except msgspec.MsgspecError as error:
        raise _error(url, f"{path} answered something else: {error}", "expected SGLang 0.4 or later") from error
    except (OSError, ValueError) as error:
        hint = "start it first: python -m sglang.launch_server --model-path MODEL --port 30000"
        why = getattr(error, "reason", error)
        raise _error(url, f"no SGLang server answers {path}: {getattr(why, 'strerror', None) or why}", hint) from error


@cache
def _direct() -> urllib.request.OpenerDirector:
    """Asks the server itself, as runs do: no proxy that the environment names, which may not see it and takes time."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _error(url: str, text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where(url), text, hint, "sglang")])
