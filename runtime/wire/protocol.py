"""Every message between the master and its workers, both ways. The Scheduler's commands and events are these too.

Ids: groups are numbered in the order of admission, from 0 over the whole run, so a group's data row is a pure function
of its number and the seed; a sample's number has its group and its place in the group (`job/sample_ids.py`), however
many samples that has. Tensors never travel here: `Execute` says which worker's store holds what.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct, field

from realgraph.runtime.wire.metrics import ArrivedBytes, Mean, Metric, ResidentBytes


class _Message(Struct, frozen=True, tag=True, array_like=False):
    pass


# --- master -> worker -------------------------------------------------------------------------------------------------


class Peer(Struct, frozen=True):
    """The address of one worker's store: same `host` means shared memory by Unix socket `local`, else TCP `address`."""

    worker: int
    host: str
    local: str
    address: str
    key: str  # CurveZMQ public key, Z85
    apart: bool = False  # its host does not see the run directory


class Configure(_Message, frozen=True):
    """First message: the job (JSON of Job), the other workers, and the address of the tensor-collective store."""

    job: bytes
    peers: tuple[Peer, ...]
    collective: str  # where those meet who form process groups (`rendezvous.py`); '' where one worker is by itself
    resume: str = ""  # checkpoint folder to load, '' for a fresh start
    engine: tuple[int, ...] = ()  # of a worker that stands for a lost one: all of its engine, with groups of their own


class Meet(_Message, frozen=True):
    """A new process stands for a worker that is gone: its store is here from now on. Answer `Met`."""

    peer: Peer
    process: int  # its number in that place, from 1


class Load(_Message, frozen=True):
    """Read the data rows of `groups`, tokenise them, and put the graph's inputs into the store."""

    groups: tuple[int, ...]
    task: int | None = None  # of an evaluation, whose groups are held-out rows (`held_out_group`): answered with Done


class SampleSource(Struct, frozen=True, gc=False):
    """`worker` holds `keys` of `samples` (group keys: of the samples' groups)."""

    worker: int
    keys: tuple[str, ...]
    samples: tuple[int, ...]


class Submit(_Message, frozen=True):
    """Load `groups` and generate their samples by `call` with weights of at least `version`; results stream back. What
    other engines have drawn of them, as far as this worker was told, is not drawn again.

    sources: of a later generate call of the groups, which finds its prompts there. keepers: see `Keep`.
    """

    call: str
    groups: tuple[int, ...]
    version: int
    sources: tuple[SampleSource, ...] = ()
    keepers: tuple[int, ...] = ()  # of each group; () where nobody keeps any


NOBODY = -1  # keeps the tokens of a group


class Keep(_Message, frozen=True):
    """From now on these workers keep the tokens of `groups`, each those of one, and are told them all. No answer."""

    groups: tuple[int, ...]
    keepers: tuple[int, ...]  # NOBODY for none


class Forget(_Message, frozen=True):
    """A worker is gone: await nothing from it, forget what is kept of its tokens and was not asked for. No answer."""

    worker: int


class Execute(_Message, frozen=True, gc=False):
    """Run `call` of `step` on this worker's share."""

    task: int  # the same number for all workers of a mesh
    call: str
    step: int
    # Sample ids per mini-batch (one for calls that do not train); for functions, per unit (sample, group or batch).
    shares: tuple[tuple[int, ...], ...]
    sources: tuple[SampleSource, ...]
    version: int = 0  # of the role's weights to use
    state: dict[str, float] = field(default_factory=dict)  # the call's carried numbers (adaptive KL)
    deadline_seconds: float = 600.0
    held_out: bool = False  # the samples are held-out rows: a train call evaluates its loss and takes no step


class Reallocate(_Message, frozen=True):
    """Copy `role`'s trained weights of `version` to its copy for `call` on `receivers`; `owners` serve them."""

    task: int
    role: str
    call: str
    version: int
    owners: tuple[int, ...]
    receivers: tuple[int, ...]  # of the workers of `call`: an engine that evaluates keeps its weights
    # those of them that stand for lost ones, and are in no process group with owners -> number of the process there
    joined: dict[int, int] = field(default_factory=dict)


PREFETCH = "prefetch:"  # before the call, in answers to Prefetch


class Prefetch(_Message, frozen=True, gc=False):
    """Gather what `call` of `step` will read of these sources, and keep it until its Execute comes."""

    task: int  # the same number for all workers of a mesh
    call: str
    step: int
    sources: tuple[SampleSource, ...]


class Drop(_Message, frozen=True):
    """Forget everything the store holds of these groups."""

    groups: tuple[int, ...]


class Save(_Message, frozen=True):
    """Write this worker's part of a checkpoint of `step` under `folder` (the master makes it whole by a rename)."""

    task: int
    step: int
    folder: str


RESCUE_CALL = "rescue"  # in the answers to Rescue; no call of a graph: a worker may also fail by itself meanwhile


class Rescue(_Message, frozen=True):
    """After a failure: write this worker's share of the trained states as they were when `versions` were current.

    Done at once, whatever the compute thread is in; answered with Done or Failed (their `call` is RESCUE_CALL).
    """

    task: int
    step: int
    folder: str
    versions: dict[str, int]  # role -> completed train calls
    writers: tuple[int, ...]  # all workers that are left


class Evaluate(_Message, frozen=True):
    """Generate and score the held-out rows `rows` (this worker's share) with weights of exactly `version`.

    Groups that the worker is making stand still meanwhile and go on afterwards, with the tokens they have; beside: they
    go on all the time, and the worker takes other commands. checkpoint: its folder, which the weights are read from, by
    a worker that has no groups; '' for those that it has.

    Where models score, it goes in parts. draw: samples of the generate call `call` are drawn and stored, in groups of
    their own (`held_out_group`), and told in the answer; a later call finds its prompts in `sources`. judge: what other
    calls have written about them lies in `sources`; those that it does not name are left out.
    """

    task: int
    step: int
    rows: tuple[int, ...]
    version: int
    beside: bool = False
    checkpoint: str = ""
    part: Literal["all", "draw", "judge"] = "all"
    call: str = ""
    sources: tuple[SampleSource, ...] = ()


class Abort(_Message, frozen=True):
    """Stop generating these groups and forget those that are not made yet, with their prompts; no answer."""

    groups: tuple[int, ...]


class EndSession(_Message, frozen=True):
    """The generate call `call` is over for now: give back the memory of its caches, and of weights that are brought
    again before its next use; no answer."""

    call: str


class Shutdown(_Message, frozen=True):
    """Answer `Bye` and end."""


Command = (
    Configure
    | Meet
    | Load
    | Submit
    | Keep
    | Forget
    | Execute
    | Reallocate
    | Drop
    | Prefetch
    | Save
    | Rescue
    | Evaluate
    | Abort
    | EndSession
    | Shutdown
)


# --- worker -> master -------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """A worker has started and connects."""

    worker: int
    pid: int
    peer: Peer
    collective: str = ""


class Ready(_Message, frozen=True):
    """Models loaded, groups joined: calls may come."""

    worker: int
    n_rows: int
    n_eval_rows: int = 0
    collective: str = ""
    facts: dict[str, float] = field(default_factory=dict)  # for the master's log: parameters, seconds, data rows


class Heartbeat(_Message, frozen=True):
    """The control loop lives."""

    worker: int
    host_bytes: int = 0
    device_bytes: int = 0


class Sample(Struct, frozen=True, gc=False):
    """The master's facts about a sample."""

    sample: int
    n_tokens: int
    n_new_tokens: int = 0
    finished: bool = True  # sampling ended by itself
    oldest: int = 0  # the lowest version among its tokens
    by_version: tuple[int, ...] = ()  # new tokens of version `oldest`, of the next one, and so on
    own_tokens: tuple[int, ...] = ()  # lengths by other roles' own tokenizers, in the order of `program.own_keys`

    def n_before(self, version: int) -> int:
        """New tokens of versions before this one."""
        return sum(self.by_version[: max(0, version - self.oldest)])


class Loaded(_Message, frozen=True):
    """The inputs of `groups` are in the worker's store."""

    worker: int
    groups: tuple[int, ...]
    samples: tuple[Sample, ...]
    skipped: tuple[int, ...] = ()  # groups that are dropped: their prompts are too long


class Generated(_Message, frozen=True):
    """All samples of these groups are in the worker's store."""

    worker: int
    call: str
    groups: tuple[int, ...]
    samples: tuple[Sample, ...]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    started: float = 0.0  # Unix time, in seconds
    ended: float = 0.0
    drawn: int = 0  # tokens, with those of their prompts, that the worker has of groups that it is still making


class Done(_Message, frozen=True, gc=False):
    """One worker's share of a task ended; what it wrote lies in its store."""

    worker: int
    task: int
    call: str
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)  # the call's carried numbers after it
    left_out: dict[int, tuple[int, ...]] = field(default_factory=dict)  # group -> samples, by a call that writes `keep`
    by_group: dict[int, dict[str, Mean]] = field(default_factory=dict)  # what a function has measured of each group
    started: float = 0.0
    ended: float = 0.0
    transcripts: tuple[str, ...] = ()
    arrived: ArrivedBytes = ArrivedBytes()  # for this task
    resident: ResidentBytes | None = None  # of the copy that a model call or a reallocation has used
    loaded: tuple[Sample, ...] = ()  # of held-out rows


class Failed(_Message, frozen=True):
    """A call, or the worker itself (`call` ''), failed. `sample` is -1 where no single one is to blame."""

    worker: int
    call: str
    error: str  # one line, for people
    kind: Literal["call", "function", "data", "numerics", "disk", "start", "worker", "deadline"] = "call"
    sample: int = -1
    detail: str = ""  # the traceback, for the log
    late: tuple[int, ...] = ()  # workers that have missed a deadline: their stacks say why
    frames: tuple[str, ...] = ()  # lines for people about these stacks, where they have been looked at
    task: int = -1  # of a Prefetch, which may have been given up since


class Met(_Message, frozen=True):
    """The worker has connected to the new process of a peer, and lets it in."""

    worker: int
    peer: int
    process: int


class Bye(_Message, frozen=True):
    """The worker has ended its work in order."""

    worker: int


Reply = Hello | Ready | Met | Heartbeat | Loaded | Generated | Done | Failed | Bye

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
