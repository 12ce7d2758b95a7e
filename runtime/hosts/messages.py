"""Every message between the master and the agents of its hosts, both ways. Workers have messages of their own."""

from msgspec import Struct, field
from msgspec.msgpack import Decoder, Encoder

from realgraph.planner.inputs.detect import Probe
from realgraph.runtime.job.manifest import FileSum
from realgraph.runtime.processes.launcher import WorkerBoot, WorkerProgram, WorkerStacks

BEAT_SECONDS = 1.0  # between two signs of life of an agent


class _HostMessage(Struct, frozen=True, tag=True):
    pass


# --- agent -> master --------------------------------------------------------------------------------------------------


class HostFacts(Struct, frozen=True):
    """A host as it sees itself. id: of its boot and network namespace. address: under which the other hosts reach it.
    versions: of what its workers run, by name."""

    name: str
    id: str
    address: str
    machine: Probe
    versions: dict[str, str]


class Join(_HostMessage, frozen=True):
    """An agent has dialled in."""

    facts: HostFacts


class Looked(_HostMessage, frozen=True):
    """The answer to Look. missing: paths that this host has not; shares_run_folder: it sees the master's token, and so
    the run directory; other_data: of a host that does not, files of data that are not the master's, and how. asked,
    answered: when, by this host's clock. unset: variables that its environment has not. others: of the files that are
    compared by samples, those that are not the master's, and how."""

    missing: tuple[str, ...]
    shares_run_folder: bool
    other_data: tuple[str, ...] = ()
    asked: float = 0.0  # Unix seconds
    answered: float = 0.0
    unset: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class HostBeat(_HostMessage, frozen=True):
    """The agent lives."""


class HostStarted(_HostMessage, frozen=True):
    """All workers of this host run. logs: the folder of this host that they print to, '' where that is the run's."""

    logs: str = ""


class HostFailed(_HostMessage, frozen=True):
    """The workers could not be started, and none is left."""

    error: str


class WorkerEnded(_HostMessage, frozen=True):
    """A worker is gone. last_lines: the end of its log."""

    worker: int
    status: int
    last_lines: str = ""


class StacksDumped(_HostMessage, frozen=True):
    """The answer to DumpStacks."""

    stacks: WorkerStacks


class HostLeaves(_HostMessage, frozen=True):
    """The agent is about to end its workers, which the master has not asked for."""

    reason: str


class HostEnded(_HostMessage, frozen=True):
    """Nothing of the run is left on this host."""


AgentMessage = Join | HostBeat | Looked | HostStarted | HostFailed | WorkerEnded | StacksDumped | HostLeaves | HostEnded


# --- master -> agent --------------------------------------------------------------------------------------------------


class Refuse(_HostMessage, frozen=True):
    """This host is not taken; the agent says why and ends."""

    reason: str


class Look(_HostMessage, frozen=True):
    """Say which of `paths` are not here, if the file `token` holds `content`, and where it does not, which files of
    `sums` are others here; which files of `sampled`, checksums of samples, are others here in any case; and which
    `variables` the environment has not. No value of these is told."""

    paths: tuple[str, ...]
    token: str
    content: str
    sums: dict[str, FileSum] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    sampled: dict[str, FileSum] = field(default_factory=dict)


class LaunchWorkers(_HostMessage, frozen=True):
    """Start these workers. Those with `files` are on a host that does not see the run directory: their logs stay on
    it."""

    boots: tuple[WorkerBoot, ...]
    program: WorkerProgram
    deadline_seconds: float


class RestartWorker(_HostMessage, frozen=True):
    """Start a new process for a worker of this host that has ended. Its end is told as that of any other."""

    boot: WorkerBoot


class MasterBeat(_HostMessage, frozen=True):
    """The master lives, and sees by sending this if the agent is still connected."""


class DumpStacks(_HostMessage, frozen=True):
    """Say where the threads of a worker are."""

    worker: int


class KillWorker(_HostMessage, frozen=True):
    """End one worker at once."""

    worker: int


class EndHost(_HostMessage, frozen=True):
    """End the workers, after a grace by force, answer HostEnded, and end; or, with a key for another start of the run,
    dial again with it. again_seconds: for the run to listen once more."""

    grace_seconds: float
    again: str = ""  # the line of a join key
    again_seconds: float = 0.0


MasterMessage = Refuse | Look | LaunchWorkers | RestartWorker | MasterBeat | DumpStacks | KillWorker | EndHost

encode = Encoder().encode
decode_from_agent: Decoder[AgentMessage] = Decoder(AgentMessage)
decode_from_master: Decoder[MasterMessage] = Decoder(MasterMessage)
