"""The allocation of Slurm that this process runs in: its nodes, the way to them, its end. Asks Slurm's own commands."""

import socket
import subprocess
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.hosts.facts import own_address

ASK_SECONDS = 30.0  # for a controller that may be busy
LAUNCH = Where(path="$.launch")


class SlurmJob(Struct, frozen=True):
    """A job's nodes, in Slurm's order. restarts: how often the job has gone back into the queue."""

    job: str
    nodes: tuple[str, ...]
    restarts: int = 0


def ask(*words: str) -> str:
    """The output of one of Slurm's commands. Raises ConfigError where it fails, is missing or gives no answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except FileNotFoundError:
        text, hint = f"there is no `{words[0]}` here", "run where Slurm's commands are, or choose another launch.kind"
    except subprocess.TimeoutExpired:
        text, hint = f"`{words[0]}` gave no answer in {ASK_SECONDS:.0f} s", "try again: the controller may be busy"
    else:
        if not done.returncode:
            return done.stdout
        said = (done.stderr or done.stdout).strip().splitlines()
        text, hint = f"`{words[0]}` failed: {said[-1] if said else f'exit status {done.returncode}'}", ""
    raise ConfigError([Problem(LAUNCH, text, hint, "slurm")])


def current_allocation(environment: Mapping[str, str]) -> SlurmJob | None:
    """The allocation that this process is in. Raises ConfigError where Slurm can't name its nodes."""
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    names = tuple(ask("scontrol", "show", "hostnames", nodes).split())
    return SlurmJob(job, names, restarts_of(environment))


def the_allocation(environment: Mapping[str, str]) -> SlurmJob:
    """The allocation that this process is in. Raises ConfigError where there is none."""
    found = current_allocation(environment)
    if found is None:
        hint = "salloc --nodes=N ..., or let realgraph write and submit the batch script: realgraph run FILE --submit"
        raise ConfigError([Problem(LAUNCH, "this shell is in no allocation of Slurm", hint, "slurm")])
    return found


def restarts_of(environment: Mapping[str, str]) -> int:
    """The times that this process' job has gone back into the queue; 0 outside of Slurm."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def address_towards(allocation: SlurmJob) -> str:
    """This host's address on the way to the nodes of an allocation. Raises ConfigError."""
    node = allocation.nodes[-1]
    fields = _fields(ask("scontrol", "--oneliner", "show", "node", node))
    name = fields.get("NodeAddr", node)
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        hint = "name the network that the nodes share: launch.interface"
        raise ConfigError([Problem(LAUNCH, f"node {node}: {name} has no address: {error}", hint, "slurm")]) from None
    return own_address((address, 1))


def requeue_due(allocation: SlurmJob, now: datetime, within_seconds: float) -> bool:
    """True for a batch job whose time limit is that near. Raises ConfigError."""
    fields = _fields(ask("scontrol", "--oneliner", "show", "job", allocation.job))
    try:
        left = datetime.fromisoformat(fields.get("EndTime", "")) - now
    except ValueError:  # Unknown: there is no limit
        return False
    return fields.get("BatchFlag") != "0" and left.total_seconds() <= within_seconds


def requeue(allocation: SlurmJob) -> None:
    """Put the job back into the queue. Raises ConfigError."""
    ask("scontrol", "requeue", allocation.job)


def _fields(line: str) -> dict[str, str]:
    """`A=1 B=2` as scontrol prints it on one line; values with spaces are cut at the first."""
    pairs = (word.partition("=") for word in line.split())
    return {name: value for name, equals, value in pairs if equals}
