"""A running Ray cluster for a run: its nodes, what they have, and the agents on them. Asks a process that imports Ray.

Whoever can talk to a Ray cluster can run any code on it: one that asks for no token is refused.
"""

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.detect import CPU
from realgraph.runtime.clusters.machines import Machine
from realgraph.runtime.clusters.program import StartedByProgram
from realgraph.runtime.hosts.facts import own_address, split_address
from realgraph.runtime.hosts.starter import Invitation

T = TypeVar("T")
ASK_SECONDS = 120.0  # for a cluster whose nodes load Python from a file system that may be slow
REACH_SECONDS = 10.0
OPEN = 9  # the exit code of that process where the cluster asks for no token
LAUNCH = Where(path="$.launch.address")
TOKEN = "RAY_AUTH_MODE"
PLAIN_LINES = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}  # every line of every agent, as it is
Bundle = dict[str, float]  # what a node gives, in Ray's words: {"GPU": 8}


class RayNode(Struct, frozen=True):
    """A node that is alive. resources: all that it has, free or not."""

    id: str
    name: str
    address: str
    resources: Bundle

    def has(self, bundle: Bundle) -> bool:
        """True where the node could ever give it."""
        return all(self.resources.get(name, 0.0) >= value for name, value in bundle.items())


class RayCluster(Struct, frozen=True):
    """A cluster by its address (`auto`, or HOST:PORT of its head). environment: of this process."""

    address: str
    environment: dict[str, str]
    trusted_network: bool = False

    def nodes(self) -> tuple[RayNode, ...]:
        """Those that are alive. Raises ConfigError, also for a cluster that asks for no token."""
        found, code = self._ask("nodes", RayNode)
        if code == OPEN and not self.trusted_network:
            text = f"the Ray cluster at {self.address} asks for no token: whoever reaches it can run code as you"
            hint = f"start it with {TOKEN}=token (ray start), or say that its network is closed: launch.trusted_network"
            raise ConfigError([Problem(LAUNCH, text, hint, "ray")])
        return found

    def machines(self) -> tuple[Machine, ...]:
        """The nodes that may work for a run, as each describes itself. Raises ConfigError."""
        return self._ask("machines", Machine)[0]

    def agents(self, bundles: Sequence[Bundle], log: Path, say: Callable[[str], None]) -> StartedByProgram:
        """Starts an agent on a node of its own for each bundle."""
        asked = msgspec.json.encode(list(bundles)).decode()

        def words(invitation: Invitation) -> tuple[str, ...]:
            return (*self._words("agents"), asked, str(invitation.n_spare), *invitation.words)

        return StartedByProgram("Ray", words, log, say, self.environment | PLAIN_LINES)

    def _words(self, what: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "realgraph.runtime.clusters.ray_driver", what, self.address)

    def _ask(self, what: str, kind: type[T]) -> tuple[tuple[T, ...], int]:
        """The lines that the process that imports Ray prints, and its exit code, 0 or OPEN. Raises ConfigError."""
        if importlib.util.find_spec("ray") is None:
            hint = "pip install 'realgraph[ray]', in the environment of every node"
            raise ConfigError([Problem(Where(path="$.launch.kind"), "Ray is not installed here", hint, "ray")])
        self._reach()
        try:
            done = subprocess.run(
                self._words(what),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._no_answer(f"no answer within {ASK_SECONDS:.0f} s") from None
        if done.returncode not in (0, OPEN):
            said = done.stderr.strip().splitlines()
            raise self._no_answer(said[-1] if said else f"exit code {done.returncode}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        try:
            return tuple(msgspec.json.decode(line, type=kind) for line in lines), done.returncode
        except msgspec.MsgspecError as error:
            raise self._no_answer(str(error)) from None

    def _reach(self) -> None:
        """Raises ConfigError where nothing listens at the address, for which Ray itself would wait for minutes."""
        if self.address == "auto":
            return
        host, port = split_address(self.address)
        try:
            socket.create_connection((host, port), REACH_SECONDS).close()
        except OSError as error:
            raise self._no_answer(f"nothing listens on {self.address}: {reason(error)}") from None

    def _no_answer(self, why: str) -> ConfigError:
        hint = "see `ray status` on this host, which must be a node of the cluster and have its token"
        return ConfigError([Problem(LAUNCH, f"the Ray cluster can't be asked: {why}", hint, "ray")])


def bundles_of(cluster: Cluster) -> tuple[Bundle, ...]:
    """The share of each node that a run takes: its GPUs, or a CPU for each worker."""
    return tuple(
        {"CPU" if group.kind == CPU else "GPU": float(group.devices_per_node)}
        for group in cluster.groups
        for _ in range(group.nodes)
    )


def usable(nodes: Sequence[RayNode]) -> tuple[RayNode, ...]:
    """The nodes that may work for a run: where any has GPUs, those that do, as a head without one is common."""
    gpus = tuple(node for node in nodes if node.resources.get("GPU", 0.0) >= 1)
    return gpus or tuple(nodes)


def check_room(nodes: Sequence[RayNode], bundles: Sequence[Bundle]) -> None:
    """Raises ConfigError where these nodes could not hold the plan even if nothing else ran on them."""
    for name in sorted({name for bundle in bundles for name in bundle}):
        wanted = sorted((bundle[name] for bundle in bundles if name in bundle), reverse=True)
        there = sorted((node.resources.get(name, 0.0) for node in nodes), reverse=True)
        if len(there) < len(wanted) or any(has < wants for has, wants in zip(there, wanted, strict=False)):
            counts = {n: wanted.count(n) for n in wanted}
            shapes = " and ".join(f"{n} node{'s' * (n > 1)} with {size:g} {name}s each" for size, n in counts.items())
            has = ", ".join(f"{node.name} ({node.address}) with {_text(node.resources)}" for node in nodes)
            text = f"the plan has {shapes}, and the Ray cluster has {has}"
            hint = "add nodes, or plan for these: cluster.nodes and cluster.devices"
            raise ConfigError([Problem(Where(path="$.cluster.nodes"), text, hint, "ray")])


def address_towards(nodes: Sequence[RayNode]) -> str:
    """This host's address on the way to the nodes."""
    return own_address((nodes[-1].address, 1))


def _text(resources: Bundle) -> str:
    return ", ".join(f"{value:g} {name}s" for name, value in sorted(resources.items()) if value)
