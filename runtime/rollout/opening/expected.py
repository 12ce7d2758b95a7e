"""The SGLang server that a run needs, and all in which one that answers is another. Needs no torch: who starts a run
asks servers that run already before any worker is there, and the workers ask again."""

import json
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.messages import ServedModel, ServerArguments


class Expected(Struct, frozen=True):
    """The server that a run needs. where: in the run file, for messages."""

    where: Where
    model_type: str
    vocabulary: int
    dtype: str
    context: int  # tokens of prompt and response
    positions: int  # of the model, where the server names no context
    tp: int = 1
    ep: int = 1


class Served(NamedTuple):
    """A server as it describes itself."""

    url: str
    model: ServedModel
    arguments: ServerArguments
    vocabulary: int | None = None  # None: it does not say, and its model can't be seen from here


async def check(client: SglangClient, expected: Expected) -> None:
    """Raises ConfigError with all that is wrong with a server, SglangError where it does not answer as one."""
    model, arguments = await client.model_info(), await client.server_info()
    vocabulary = await client.vocabulary() or _vocabulary(model.model_path)
    problems = differences(expected, Served(client.url, model, arguments, vocabulary))
    if problems:
        raise ConfigError(problems)


def differences(expected: Expected, served: Served) -> list[Problem]:
    """All in which a server is another than the run needs."""
    model, server, found = served.model, served.arguments, list[tuple[str, str]]()
    if model.model_type not in (None, expected.model_type):
        text = f"serves a {model.model_type} model, and the run needs {expected.model_type}"
        found.append((text, "start it with the model of the role"))
    if served.vocabulary not in (None, expected.vocabulary):
        text = f"serves a model with a vocabulary of {served.vocabulary}, and the run's has {expected.vocabulary}"
        found.append((text, "start it with the model of the role"))
    if server.dtype not in (None, "auto", expected.dtype):
        text = f"computes in {server.dtype}, and the role in {expected.dtype}"
        found.append((text, f"start it with --dtype {expected.dtype}, or set the role's dtype"))
    context = server.context_length or expected.positions
    if context < expected.context:
        text = f"takes {context} tokens of prompt and response, and the run has up to {expected.context}"
        found.append((text, "start it with a longer --context-length, or lower batch.max_new_tokens"))
    if server.tp_size != expected.tp:
        text = f"has {server.tp_size} tensor-parallel ranks, and the plan {expected.tp}"
        found.append((text, f"start it with --tp-size {expected.tp}, or pin tp of the call in `allocation`"))
    if server.ep_size != expected.ep:
        text = f"spreads experts over {server.ep_size} ranks, and the plan over {expected.ep}"
        found.append((text, f"start it with --ep-size {expected.ep}, or pin ep of the call in `allocation`"))
    for axis, size in (("data-parallel replicas", server.dp_size), ("pipeline stages", server.pp_size)):
        if size != 1:
            found.append((f"has {size} {axis}", "start one server a replica"))
    return [Problem(expected.where, f"the SGLang server {served.url} {text}", hint, "sglang") for text, hint in found]


def _vocabulary(model_path: str) -> int | None:
    """The size of a model folder's vocabulary; None where the folder can't be seen from here."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return None
    size = json.loads(file.read_bytes()).get("vocab_size")
    return size if isinstance(size, int) else None
