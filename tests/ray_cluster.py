"""A real Ray cluster for tests: a head and more nodes, each in a network namespace, with a token of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.namespaces import Network
from tests.traces import open_files, title_of

PORT = 6399
READY_SECONDS = 60.0


@dataclass(frozen=True)
class RayNodes:
    """The cluster, while it runs. state: the folder of its sessions. token: '' where it asks for none."""

    network: Network
    state: Path
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def address(self) -> str:
        """The address of its head."""
        return f"{self.network.addresses[0]}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of whoever may use it."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        protected = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        return plain | more | (protected if self.token else {"RAY_AUTH_MODE": "disabled"})

    def words(self, *command: str, node: int = 0) -> list[str]:
        """A command, to be run on a node."""
        return ["nsenter", f"--net=/run/netns/{self.network.spaces[node]}", *command]

    def call(
        self, *command: str, cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head to its end."""
        return subprocess.run(
            self.words(*command),
            env=environment or self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )


def ray_words(*words: str) -> list[str]:
    """`ray WORDS...`."""
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


@contextmanager
def ray_nodes(network: Network, state: Path, cpus: int, *, token: bool = True) -> Iterator[RayNodes]:
    """A cluster over the namespaces of a network, each node with so many CPUs; its processes are ended afterwards."""
    made = RayNodes(network, state, **({} if token else {"token": ""}))
    state.mkdir(parents=True)
    try:
        for number, address in enumerate(network.addresses):
            place = ["--head", f"--port={PORT}", f"--temp-dir={state}"] if not number else [f"--address={made.address}"]
            options = [f"--node-ip-address={address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
            options += ["--include-dashboard=false"] if not number else []
            memory = ["--object-store-memory=100000000", "--num-gpus=0"]
            words = made.words(*ray_words("start", *place, *options, *memory), node=number)
            done = subprocess.run(
                words, env=made.environment, capture_output=True, text=True, timeout=READY_SECONDS, check=False
            )
            assert not done.returncode, done.stdout + done.stderr
        yield made
    finally:
        _end(state)
        shutil.rmtree(state, ignore_errors=True)


def _end(state: Path) -> None:
    """End the processes of this cluster alone: `ray stop` would end those of every one on the machine."""
    last = time.monotonic() + 10
    while found := [pid for pid in _processes(state) if pid != os.getpid()]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGTERM if time.monotonic() < last - 5 else signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert time.monotonic() < last, [title_of(pid) for pid in found]
        time.sleep(0.2)


def _processes(state: Path) -> list[int]:
    """Those whose command line or open files name the folder of the cluster's sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "cmdline").read_text(errors="replace") + " ".join(open_files(entry))
            running = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if running and str(state) in text:
            found.append(int(entry.name))
    return found
