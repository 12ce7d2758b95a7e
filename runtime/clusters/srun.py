"""Agents that Slurm starts: one `srun` over the nodes of the allocation that this process is in."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from realgraph.runtime.hosts.starter import Invitation
from realgraph.runtime.job.rotation import last_lines
from realgraph.runtime.job.run_folder import private
from realgraph.runtime.processes.launcher import LaunchError, describe_exit

END_SECONDS = 10.0  # for srun to end by itself once its agents have, and again once it has been told to
LOOK_SECONDS = 0.1  # between two looks at it
# The whole of each node, one agent each, beside the step that this process may run in; one agent's end ends no other's.
EACH_NODE = (
    *("--ntasks-per-node=1", "--overlap", "--no-kill", "--mem=0", "--cpu-bind=none"),
    *("--wait=0", "--kill-on-bad-exit=0", "--unbuffered"),
)


def srun(n_nodes: int, *command: str) -> tuple[str, ...]:
    """The words that run a command of realgraph's once on each of so many nodes."""
    return ("srun", f"--nodes={n_nodes}", f"--ntasks={n_nodes}", *EACH_NODE, sys.executable, "-m", *command)


class StartedBySrun:
    """Implements AgentStarter. srun hands its standard input, and with it the key, to every task; it outlives the event
    loop of one start of the run, where the run goes on by itself."""

    def __init__(self, n_nodes: int, log: Path, say: Callable[[str], None]) -> None:
        """n_nodes: of the allocation. log: the file for what srun and the agents print. say: shows a line to the
        user."""
        self._n_nodes, self._log, self._say = n_nodes, log, say
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, invitation: Invitation) -> None:
        """See AgentStarter."""
        n_agents = min(self._n_nodes, invitation.n_hosts + invitation.n_spare)
        nodes = "1 node" if n_agents == 1 else f"{n_agents} nodes"
        self._say(f"srun starts an agent on {nodes}; what it prints: {self._log}")
        words = srun(n_agents, "realgraph", "worker", "--key", "-", *invitation.words)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=private) as log:
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise LaunchError(f"srun can't be started: {error.strerror}") from None
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `failed` says why
            stdin.write(invitation.key.encode())
            stdin.close()

    async def failed(self) -> str:
        """See AgentStarter."""
        assert self._process is not None
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_SECONDS)
        said = last_lines(self._log, 5)
        return f"srun {describe_exit(status)}" + (f": {said}" if said else "")

    async def stop(self) -> None:
        """See AgentStarter."""
        if self._process is not None:
            await _over(self._process)
            self._process.terminate()  # does nothing where it has ended
            await _over(self._process)
            self._process.kill()
            await _over(self._process)


async def _over(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, END_SECONDS at most."""
    last = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < last:
        await asyncio.sleep(LOOK_SECONDS)
