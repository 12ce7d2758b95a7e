"""Runs over several hosts for tests: `realgraph run` with `launch: {kind: hosts}`, and an agent for each host."""

import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.broken_runs import LONG
from tests.namespaces import Network
from tests.runs import GRPO, PLAIN, Running, Special, start, write_run
from tests.traces import Traces, traces

TWO_BY_TWO: dict[str, Any] = {"cluster": {"nodes": 2, "devices": 2}}
SHORT = Special(limits={"hosts.agent.CONNECT_SECONDS": 2.0})


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nothing has for now."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def agent(home: Path, listen: str, name: str, *options: str, special: Special = PLAIN) -> Running:
    """`realgraph worker` with the key of the run in `home`, or a copy of it where it does not see that."""
    key = home / "run/join.key"
    if special.hidden:
        key = Path(shutil.copy2(key, home / f"{name}.key"))
    words = ("worker", "--connect", listen, "--key", str(key), "--name", name)
    return start(home, *words, *options, name=f"agent-{name}", special=special)


class Hosts:
    """A run of several hosts and their agents once it waits for them: all on this machine, or each in a network
    namespace, the master in the first one's. limits: of constants, see `Special`. apart: names of hosts that do not see
    the run directory. special: of the run's own process."""

    def __init__(
        self,
        home: Path,
        *parts: dict[str, Any],
        names: Sequence[str] = "ab",
        words: Sequence[str] = (),
        network: Network | None = None,
        limits: Mapping[str, float] = MappingProxyType({}),
        apart: Collection[str] = (),
        special: Special = PLAIN,
    ) -> None:
        self.home = home
        self.traces: Traces = traces(home)
        self._network, self._limits, self._apart = network, dict(limits), apart
        self.listen = f"{network.addresses[0]}:7000" if network else f"127.0.0.1:{free_port()}"
        launch = {"launch": {"kind": "hosts", "listen": self.listen, "join_seconds": 60}}
        if not words:
            words = ("run", str(write_run(home, "run", GRPO, LONG, TWO_BY_TWO, launch, *parts)))
        first = replace(special, namespace=network.spaces[0]) if network else special
        self.running = start(home, *words, f"launch.listen={self.listen}", special=first)
        self.running.until((home / "run/join.key").exists, "the join key")
        self.agents: dict[str, Running] = {}
        self.join(names)

    def join(self, names: Sequence[str]) -> None:
        """Start an agent for each of these hosts."""
        for number, name in enumerate(names):
            space = self._network.spaces[number] if self._network else ""
            hidden = str(self.home / "run") if name in self._apart else ""
            special = Special(namespace=space, limits=self._limits, hidden=hidden)
            self.agents[name] = agent(self.home, self.listen, name, special=special)

    def at_step(self, step: int) -> "Hosts":
        """Wait until so many steps are recorded."""
        self.running.until_step(step)
        return self

    def ends(self, code: int, seconds: float = 60.0) -> str:
        """The output of the run, once it and all agents have ended and nothing is left."""
        found = self.running.wait(seconds)
        output = self.running.output()
        assert found == code, "\n".join((output, *(f"{name}: {one.output()}" for name, one in self.agents.items())))
        for one in self.agents.values():
            one.wait(30)
        self.traces.gone()
        return output

    def error(self, seconds: float = 60.0) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.ends(3, seconds).splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, lines
        return lines[0]

    def close(self) -> None:
        """Kill what a test has left alive."""
        for running in (self.running, *self.agents.values()):
            if running.process.is_alive():
                running.process.kill()
                running.process.join(10)
