"""Events that the Scheduler is told besides the workers' replies, and the actions that it asks for. Plain data."""

from msgspec import Struct, field, structs

from realgraph.runtime.wire.metrics import Mean, Metric
from realgraph.runtime.wire.protocol import Command, Failed, Reply

STATE_FORMAT = 2  # version of Checkpointed; 1 also had the number of the next task


# --- events that come from the master itself --------------------------------------------------------------------------


class Tick(Struct, frozen=True, tag=True):
    """Time has passed: `Scheduler.deadline()` is reached."""


class WorkerLost(Struct, frozen=True, tag=True):
    """A worker's process has ended, or has not been heard of for too long."""

    worker: int
    reason: str


class EngineJoined(Struct, frozen=True, tag=True):
    """New processes are ready in the place of an engine that was lost, with the weights that a run begins with. The
    other workers know where they are."""

    workers: tuple[int, ...]  # of the engine, ascending
    process: int  # their number in that place, from 1


class StopRequested(Struct, frozen=True, tag=True):
    """The user wants the run to end in order: finish the step in hand, write a checkpoint, stop."""


Event = Reply | Tick | WorkerLost | EngineJoined | StopRequested


# --- state ------------------------------------------------------------------------------------------------------------


class Checkpointed(Struct, frozen=True, forbid_unknown_fields=True):
    """All that the Scheduler needs to go on exactly from a step boundary; it is written beside the weights.

    A worker loads the copy of a call from the checkpoint, whose weights are those of `copies` or, where the copy lags
    behind, newer ones.
    """

    step: int  # completed steps
    versions: dict[str, int]  # role -> completed train calls
    next_group: int  # groups from this number on have not been touched
    n_trained: int  # groups
    n_discarded: int  # groups
    open: tuple[int, ...] = ()  # groups admitted and neither trained nor discarded: they are generated again
    carried: dict[str, dict[str, float]] = field(default_factory=dict)  # call -> its carried numbers
    best_step: int = -1  # completed steps at the best evaluation so far; -1: none yet
    best_value: float = 0.0
    best_reward: float = 0.0  # of that evaluation: of equal values the higher one counts
    evaluated_step: int = -1  # completed steps at the last evaluation
    copies: dict[str, int] = field(default_factory=dict)  # call -> version of its own copy of trained weights
    format: int = STATE_FORMAT


class CheckpointedWithTask(Checkpointed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Format 1 of a checkpoint's state: tasks were numbered over all lives of a run."""

    next_task: int

    @property
    def upgraded(self) -> Checkpointed:
        """The same state in today's format."""
        fields = structs.asdict(self)
        del fields["next_task"]
        return Checkpointed(**{**fields, "format": STATE_FORMAT})


# --- actions ----------------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True, tag=True, gc=False):
    """Send `command` to `worker`."""

    worker: int
    command: Command


class CallSpan(Struct, frozen=True):
    """The time from when a call of a step first started and last ended, in seconds of the workers' time.time()."""

    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class StepEnded(Struct, frozen=True, tag=True):
    """Every call of `step` (from 0) has ended on every worker, and its groups are trained."""

    step: int
    metrics: dict[str, dict[str, Metric]]  # call -> name -> metric, merged over workers
    spans: dict[str, CallSpan]
    n_groups: int
    n_samples: int
    n_tokens: int  # of whole samples of the leading generate call, as n_samples and n_new_tokens
    n_new_tokens: int  # of them, sampled
    n_skipped: int  # groups whose prompt was too long, while this step's groups were made
    n_dropped: int  # groups that were filtered out meanwhile
    n_surplus: int  # groups that were begun beyond what batches need, and discarded
    n_left_out: int  # samples of its groups that a function has left out
    age: Mean  # over samples: completed train steps since the oldest token
    oldest: int  # the largest of these ages
    versions: dict[str, int]  # role -> completed train calls
    transcripts: tuple[str, ...]
    lengths: tuple[int, ...] = ()  # new tokens of all its groups' samples at equal steps of probability, rising
    age_p95: int = 0  # 95 % of the groups are no older
    n_engines: int = 0  # that make groups, where the run goes on without one that is lost
    tokens: dict[str, int] = {}  # model call -> tokens of its samples; of a generate call those that it drew
    n_trained_tokens: int = 0  # of all samples and sequences of the data that were trained on, each of them once


class EvalEnded(Struct, frozen=True, tag=True):
    """An evaluation after `step` completed steps has ended; `best` where none before was better."""

    step: int
    metrics: dict[str, Metric]
    best: bool
    transcripts: tuple[str, ...] = ()


class CheckpointWritten(Struct, frozen=True, tag=True):
    """Every worker has written its part of the checkpoint of `step` completed steps under `folder`.

    The master writes `state` beside them and makes the folder whole by a rename.
    """

    step: int
    folder: str
    state: Checkpointed


class EngineLost(Struct, frozen=True, tag=True):
    """An engine is gone, and the run goes on without it: none of its processes is needed any more. `text` says so for
    people."""

    workers: tuple[int, ...]  # ascending
    text: str


class EngineReplaced(Struct, frozen=True, tag=True):
    """An engine that was lost is there again; `text` says so for people."""

    workers: tuple[int, ...]  # ascending
    text: str


class Halt(Struct, frozen=True, tag=True):
    """The run has ended: in order where `error` is None. Nothing follows."""

    error: Failed | None
    reason: str


Action = Send | StepEnded | EvalEnded | CheckpointWritten | EngineLost | EngineReplaced | Halt
