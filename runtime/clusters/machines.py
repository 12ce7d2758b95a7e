"""The machines of an allocation, as each of them describes itself. Run as a module, prints that of this host."""

import subprocess
import sys

import msgspec
from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.inputs.detect import Probe, probe
from realgraph.runtime.clusters.slurm import SlurmJob
from realgraph.runtime.clusters.srun import srun
from realgraph.runtime.hosts.facts import own_name
from realgraph.runtime.processes.environment import variables

LOOK_SECONDS = 120.0  # for nodes that load Python from a file system that may be slow


class Machine(Struct, frozen=True):
    """A host by its name, and what it has."""

    name: str
    has: Probe


def machines_of(allocation: SlurmJob) -> tuple[Machine, ...]:
    """The nodes of an allocation, each asked. Raises ConfigError where they can't be."""
    words = srun(len(allocation.nodes), __name__)
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False
        )
    except OSError as error:
        raise _unknown(f"srun can't be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise _unknown(f"no answer within {LOOK_SECONDS:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise _unknown(said[-1] if said else f"srun ended with exit code {done.returncode}")
    try:
        return tuple(msgspec.json.decode(line, type=Machine) for line in done.stdout.splitlines() if line.strip())
    except msgspec.MsgspecError as error:
        raise _unknown(str(error)) from None


def _unknown(why: str) -> ConfigError:
    text = f"the nodes of the allocation can't be asked what they have: {why}"
    hint = "see that realgraph is installed on them at the same path, or give cluster its nodes, kind and devices"
    return ConfigError([Problem(Where(path="$.cluster"), text, hint, "slurm")])


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(Machine(own_name(variables()), probe())).decode() + "\n")
