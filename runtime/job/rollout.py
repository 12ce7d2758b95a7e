"""The run file's section `rollout`: the engines that generate, and how they take new weights. Plain data."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Interrupt = Literal["recompute", "keep_kv", "wait"]
RolloutEngineName = Literal["embedded", "sglang"]
WeightsRoute = Literal["auto", "disk", "broadcast"]
Urls = tuple[str, ...] | dict[str, tuple[str, ...]]
# Arguments of a server that are not the user's to give: they are ours, or what servers and clients agree about.
RESERVED = ("model", "model_path", "host", "port", "nccl_port", "api_key", "admin_api_key", "weight_version", "config")


class RolloutSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Engines that generate. `interrupt`: how samples that are being generated when new weights come go on.

    `recompute`: at once, with their tokens, under the new weights; their KV cache is computed again. `keep_kv`: at
    once, over the cache that the old weights made. `wait`: to their end under the old weights, which the new ones
    wait for. See `docs/async.md`.

    `engine: sglang` generates on SGLang servers, one for each data-parallel replica of each generate call: started in
    the environment that `python` is the interpreter of, or running already at `urls`. See `docs/sglang.md`.
    """

    interrupt: Interrupt = "recompute"  # samples under way when new weights come
    min_engines: Annotated[int, Meta(ge=1)] = 1  # with which an asynchronous run goes on where others are lost
    replacements: Annotated[int, Meta(ge=0)] = 3  # new engines in the place of lost ones, in all, in one start
    max_running: Annotated[int, Meta(ge=1)] | None = None  # sequences that decode at once, per engine; default: 1,024
    engine: RolloutEngineName = "embedded"  # of generate calls; what trains is embedded in any case
    python: str | None = None  # interpreter of the environment that has SGLang; servers are started with it
    urls: Urls = ()  # of servers on this host that run already, one a replica; where several calls generate, by call
    weights: WeightsRoute = "auto"  # way of new weights to servers that are started; auto: the plan chooses
    server_args: dict[str, Any] = field(default_factory=dict)  # of servers that are started: `log_level: info`
    call_args: dict[str, dict[str, Any]] = field(default_factory=dict)  # the same of one generate call's, by its name

    def urls_of(self, call: str) -> tuple[str, ...]:
        """The servers that are given for a generate call, one for each of its replicas."""
        return self.urls.get(call, ()) if isinstance(self.urls, dict) else self.urls

    def url_path(self, call: str, replica: int) -> str:
        """The place of a server's address in the run file."""
        return f"$.rollout.urls.{call}[{replica}]" if isinstance(self.urls, dict) else f"$.rollout.urls[{replica}]"

    def arguments_of(self, call: str) -> dict[str, Any]:
        """The arguments of the servers of a generate call, by their names in Python: its own come before those of
        all."""
        both = (self.server_args, self.call_args.get(call, {}))
        return {argument_name(name): value for given in both for name, value in given.items()}


def argument_name(name: str) -> str:
    """A server's argument as Python spells it: `--tp-size` and `tp-size` are `tp_size`."""
    return name.lstrip("-").replace("-", "_")
