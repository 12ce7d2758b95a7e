"""Mistakes in the sections `rollout` and `launch` of a run file, as far as each of them alone tells."""

import os
import shutil
from collections.abc import Iterator
from typing import assert_never
from urllib.parse import urlsplit

from realgraph.graphs.errors import ConfigError
from realgraph.run_file.run_spec import RunSpec
from realgraph.runtime.hosts.facts import split_address
from realgraph.runtime.job.launch import HostsLaunch, LaunchSpec, LocalLaunch, RayLaunch, SlurmLaunch
from realgraph.runtime.job.rollout import RESERVED, RolloutSpec, argument_name

OF_THE_PLAN = ("tp_size", "tp", "dp_size", "dp", "pp_size", "pp", "ep_size", "ep")  # server arguments
OF_ALL = ("kv_cache_dtype",)  # server arguments that the plan counts with
# SGLang 0.5.23 gives no text then, except where a request is aborted that waits: the KeyError of the missing texts
# breaks its stream off as a server's death does. A stop string, which needs the tokenizer, ends the whole server.
UNUSABLE = {
    "skip_tokenizer_init": "without its tokenizer a server breaks off streams, and ends at the first stop string"
}

Mistake = tuple[str, str, str]  # path, text, hint


def section_mistakes(run: RunSpec) -> Iterator[Mistake]:
    """All of them."""
    yield from _rollout(run.rollout)
    yield from _launch(run.launch)


def _launch(spec: LaunchSpec) -> Iterator[Mistake]:
    match spec:
        case HostsLaunch(listen=address):
            path = "$.launch.listen"
        case RayLaunch(address=address) if address != RayLaunch().address:
            path = "$.launch.address"
        case LocalLaunch() | SlurmLaunch() | RayLaunch():
            return
        case _:
            assert_never(spec)
    try:
        split_address(address, path)
    except ConfigError as error:
        for problem in error.problems:
            yield path, problem.text, problem.hint


def _rollout(spec: RolloutSpec) -> Iterator[Mistake]:
    if spec.engine == "embedded":
        for name in ("python", "urls", "server_args", "call_args"):
            if getattr(spec, name):
                hint = "set rollout.engine to sglang, or leave it out"
                yield f"$.rollout.{name}", f"{name} is of SGLang servers, and rollout.engine is embedded", hint
        if spec.weights != "auto":
            hint = "set rollout.engine to sglang, or leave it out"
            yield "$.rollout.weights", "weights is of SGLang servers, and rollout.engine is embedded", hint
        return
    if spec.python is not None and spec.urls:
        hint = "leave one of them out"
        yield "$.rollout.urls", "python has servers started, and urls names servers that run already", hint
    elif spec.python is None and not spec.urls:
        hint = "set rollout.python to the interpreter of an environment with SGLang, or rollout.urls to running servers"
        yield "$.rollout.engine", "nothing says where SGLang is", hint
    if spec.python is not None and shutil.which(spec.python) is None:
        what = "can't be run" if os.path.exists(spec.python) else "is not there"
        yield "$.rollout.python", f"the interpreter {spec.python} {what}", "name one that has SGLang"
    if spec.interrupt == "keep_kv":
        hint = "leave it out: SGLang would also give the old cache to later samples"
        yield "$.rollout.interrupt", "keep_kv is for the embedded engine", hint
    if spec.urls and spec.weights == "broadcast":
        text = "servers that run already read their weights from disk: only those that realgraph starts take broadcasts"
        yield "$.rollout.weights", text, "leave it out, or give rollout.python instead of urls"
    yield from _urls(spec)
    yield from _arguments(spec)


def _urls(spec: RolloutSpec) -> Iterator[Mistake]:
    seen = set[str]()
    calls = spec.urls if isinstance(spec.urls, dict) else {"": spec.urls}
    for path, url in ((spec.url_path(call, i), url) for call, urls in calls.items() for i, url in enumerate(urls)):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield path, f"{url!r} is no address of a server", "such as http://127.0.0.1:30000"
        elif parts.username or parts.password:
            yield path, "the address holds a password, which would be logged", "leave it out"
        if url in seen:
            yield path, f"{url} is named twice", "one server generates for one replica of one call"
        seen.add(url)
    for name in ("server_args", "call_args"):
        if spec.urls and getattr(spec, name):
            text = f"{name} are of servers that are started, and urls names servers that run already"
            yield f"$.rollout.{name}", text, "give them to those servers"


def _arguments(spec: RolloutSpec) -> Iterator[Mistake]:
    given = [("server_args", spec.server_args), *((f"call_args.{call}", own) for call, own in spec.call_args.items())]
    for place, name, value in ((place, *one) for place, arguments in given for one in arguments.items()):
        bare, path = argument_name(name), f"$.rollout.{place}.{name}"
        if bare in RESERVED:
            yield path, f"{name} is set by realgraph", "leave it out"
        elif bare in OF_THE_PLAN:
            yield path, f"{name} is what the plan chooses", "pin it in `allocation`"
        elif bare in UNUSABLE and value:
            yield path, UNUSABLE[bare], "leave it out"
        elif bare in OF_ALL and place != "server_args":
            yield path, f"a plan knows one {bare} of all servers", "give it in `server_args`"
