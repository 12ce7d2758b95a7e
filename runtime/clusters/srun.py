"""Agents that Slurm starts: one `srun` over the nodes of the allocation that this process is in."""

import sys
from collections.abc import Callable
from pathlib import Path

from realgraph.runtime.clusters.program import StartedByProgram
from realgraph.runtime.hosts.starter import Invitation

# The whole of each node, one agent each, beside the step that this process may run in; one agent's end ends no other's.
EACH_NODE = (
    *("--ntasks-per-node=1", "--overlap", "--no-kill", "--mem=0", "--cpu-bind=none"),
    *("--wait=0", "--kill-on-bad-exit=0", "--unbuffered"),
)


def srun(n_nodes: int, *command: str) -> tuple[str, ...]:
    """The words that run a command of realgraph's once on each of so many nodes."""
    return ("srun", f"--nodes={n_nodes}", f"--ntasks={n_nodes}", *EACH_NODE, sys.executable, "-m", *command)


def agents_by_srun(n_nodes: int, log: Path, say: Callable[[str], None]) -> StartedByProgram:
    """Starts agents in an allocation of so many nodes. srun hands its standard input, and with it the key, to every
    task."""

    def words(invitation: Invitation) -> tuple[str, ...]:
        n_agents = min(n_nodes, invitation.n_hosts + invitation.n_spare)
        return srun(n_agents, "realgraph", "worker", "--key", "-", *invitation.words)

    return StartedByProgram("srun", words, log, say)
