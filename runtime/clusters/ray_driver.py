"""The process that talks to a Ray cluster for a run, so that the run itself needs no part of Ray.

    python -m realgraph.runtime.clusters.ray_driver nodes|machines ADDRESS
    python -m realgraph.runtime.clusters.ray_driver agents ADDRESS BUNDLES N_SPARE WORDS...

`nodes` and `machines` print one line of JSON a node; `nodes` ends with exit code OPEN where the cluster asks for no
token. `agents` reads a join key from its standard input, starts an agent on a node of its own for each bundle, and ends
with the last of them; once its standard input is closed, it ends them.
"""

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from realgraph.runtime.clusters.ray_cluster import OPEN, Bundle, RayNode, usable
from realgraph.runtime.clusters.ray_tasks import HostAgentActor, machine_text

ROOM_SECONDS, SPARE_SECONDS = 60.0, 5.0  # for bundles to be free: those of the plan, and those to spare
TASK_SECONDS = 60.0
LOOK_SECONDS = 0.5
END_SECONDS = 5.0  # for agents to end once the run has


def main(words: Sequence[str]) -> int:
    """The exit code; why it is not 0 is the last line that is printed."""
    what, address, *rest = words
    try:
        ray.init(
            address=address,
            namespace="realgraph",
            logging_level=logging.ERROR,
            log_to_driver=what == "agents",
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        return _failed(f"no Ray cluster answers at {address}: {_last_line(error)}")
    try:
        match what:
            case "nodes":
                _print(_nodes())
                return 0 if _asks_for_token() else OPEN
            case "machines":
                _print_machines()
            case _:
                bundles = msgspec.json.decode(rest[0], type=list[Bundle])
                return _agents(bundles, int(rest[1]), rest[2:])
    except RayError as error:
        return _failed(_last_line(error))
    return 0


def _failed(why: str) -> int:
    print(why, file=sys.stderr, flush=True)
    return 1


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _nodes() -> list[RayNode]:
    """Those that are alive, by their hosts' names, or where two hosts have one name by Ray's: an address, if no other
    was given."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    return [
        RayNode(
            id=node["NodeID"],
            name=node["NodeManagerHostname"] if hosts[node["NodeManagerHostname"]] == 1 else node["NodeName"],
            address=node["NodeManagerAddress"],
            resources={name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")},
        )
        for node in alive
    ]


def _asks_for_token() -> bool:
    """True where the head of the cluster refuses a question that comes without one."""
    channel = grpc.insecure_channel(ray.get_runtime_context().gcs_address)
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=TASK_SECONDS)
    except grpc.RpcError as error:
        return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    finally:
        channel.close()
    return False


def _print(nodes: Sequence[RayNode]) -> None:
    for node in nodes:
        print(msgspec.json.encode(node).decode(), flush=True)


def _print_machines() -> None:
    """Raises RayError where a node does not answer in time."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(machine_text)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
        for node in usable(_nodes())
    ]
    for line in ray.get(asked, timeout=TASK_SECONDS):
        print(line, flush=True)


def _agents(bundles: Sequence[Bundle], n_spare: int, words: Sequence[str]) -> int:
    """Raises RayError."""
    key = sys.stdin.readline().strip()
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), name="run-watch", daemon=True).start()
    group = _placed(bundles, n_spare)
    if group is None:
        free = {name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}
        return _failed(
            f"the Ray cluster has had no room for {len(bundles)} nodes with {_text(bundles)} each for "
            f"{ROOM_SECONDS:.0f} s: free on all nodes together are {free.get('CPU', 0):g} CPUs, "
            f"{free.get('GPU', 0):g} GPUs"
        )
    try:
        return _run(group, key, list(words), ended)
    finally:
        remove_placement_group(group)


def _await_end(ended: threading.Event) -> None:
    """Returns once the run has closed the pipe, or has ended."""
    while sys.stdin.buffer.read(1 << 12):
        pass
    ended.set()


def _text(bundles: Sequence[Bundle]) -> str:
    return " or ".join(sorted({", ".join(f"{value:g} {name}" for name, value in one.items()) for one in bundles}))


def _placed(bundles: Sequence[Bundle], n_spare: int) -> PlacementGroup | None:
    """A node of its own for each bundle, and where they are free now for spare ones like the first."""
    more = min(n_spare, max(0, len(_nodes()) - len(bundles)))
    for extra, seconds in ((more, SPARE_SECONDS), (0, ROOM_SECONDS)) if more else ((0, ROOM_SECONDS),):
        wanted = [dict(bundle) for bundle in (*bundles, *[bundles[0]] * extra)]
        group = placement_group(wanted, strategy="STRICT_SPREAD")
        if group.wait(seconds):
            return group
        remove_placement_group(group)
    return None


def _run(group: PlacementGroup, key: str, words: list[str], ended: threading.Event) -> int:
    """One actor a bundle, to the end of their agents or of the run. 1 where an agent could not run at all."""
    actor: Any = ray.remote(HostAgentActor)
    actors, running = [], {}
    names, places = {node.id: node.name for node in _nodes()}, placement_group_table(group)["bundles_to_node_id"]
    for number, bundle in enumerate(group.bundle_specs):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}
        actors.append(actor.options(**options).remote())
        name = names[places[number]]
        running[actors[-1].run.remote(key, [*words, "--name", name])] = name
    code, last = 0, math.inf
    while running and time.monotonic() < last:
        if ended.is_set():
            last = min(last, time.monotonic() + END_SECONDS)
        done, _ = ray.wait(list(running), timeout=LOOK_SECONDS)
        for result in done:
            name = running.pop(result)
            try:
                print(f"the agent of {name} has ended with exit code {ray.get(result)}", flush=True)
            except RayError as error:
                code = _failed(f"the actor on {name} is lost: {_last_line(error)}")
    for one in actors:
        ray.kill(one)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
