"""The work of Ray's processes on the nodes of a cluster. Ray sends it by the name of this module, and texts with it."""

import os
import subprocess
import sys

import msgspec

from realgraph.planner.inputs.detect import probe
from realgraph.runtime.clusters.machines import Machine
from realgraph.runtime.hosts.facts import own_name
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.processes.processes import die_with_parent


def machine_text() -> str:
    """This node's Machine, as JSON."""
    return msgspec.json.encode(Machine(own_name(variables()), probe())).decode()


class HostAgentActor:
    """One on each node: runs the node's agent, which ends with the process of this actor."""

    def run(self, key: str, words: list[str]) -> int:
        """`realgraph worker` with these arguments, the key on its standard input; returns its exit code."""
        owner = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", "realgraph", "worker", "--key", "-", *words],
            stdin=subprocess.PIPE,
            env={name: value for name, value in variables().items() if not name.startswith("RAY_")},  # no token
            preexec_fn=lambda: die_with_parent(owner),
        )
        process.communicate(f"{key}\n".encode())
        return process.returncode
