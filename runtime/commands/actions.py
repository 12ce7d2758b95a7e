"""What the Scheduler is told besides the workers' replies, and what it asks the master to do. Plain data."""

from msgspec import Struct, field

from realgraph.runtime.wire.protocol import Command, Failed, Mean, Metric, Reply

STATE_FORMAT = 1  # version of Checkpointed


# --- events that come from the master itself --------------------------------------------------------------------------


class Tick(Struct, frozen=True, tag=True):
    """Time has passed: `Scheduler.deadline()` is reached."""


class WorkerLost(Struct, frozen=True, tag=True):
    """A worker's process has ended, or has not been heard of for too long."""

    worker: int
    reason: str


class StopRequested(Struct, frozen=True, tag=True):
    """The user wants the run to end in order: finish the step in hand, write a checkpoint, stop."""


Event = Reply | Tick | WorkerLost | StopRequested


# --- state ------------------------------------------------------------------------------------------------------------


class Checkpointed(Struct, frozen=True, forbid_unknown_fields=True):
    """All that the Scheduler needs to go on exactly from a step boundary; it is written beside the weights.

    step: completed steps. versions: role -> completed train calls. carried: call -> its carried numbers. open: groups
    that were admitted and neither trained nor discarded; they are generated again, under the same numbers. Groups from
    `next_group` on have not been touched. copies: call -> version of the copy of trained weights that is its own; a
    worker loads such a copy from the checkpoint, whose weights are those or, where the copy lags behind, newer ones.
    """

    step: int
    versions: dict[str, int]
    next_group: int
    next_task: int
    n_trained: int
    n_discarded: int
    open: tuple[int, ...] = ()
    carried: dict[str, dict[str, float]] = field(default_factory=dict)
    best_step: int = -1  # completed steps at the best evaluation so far; -1: none yet
    best_value: float = 0.0
    evaluated_step: int = -1  # completed steps at the last evaluation
    copies: dict[str, int] = field(default_factory=dict)
    format: int = STATE_FORMAT


# --- actions ----------------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True, tag=True, gc=False):
    """Send `command` to `worker`."""

    worker: int
    command: Command


class CallSpan(Struct, frozen=True):
    """When a call of a step first started and last ended, in seconds of the workers' time.time()."""

    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class StepEnded(Struct, frozen=True, tag=True):
    """Every call of `step` (from 0) has ended on every worker, and its groups are trained.

    metrics: call -> name -> metric, merged over workers. n_tokens counts whole samples, n_new_tokens what was sampled.
    n_skipped groups had a prompt that was too long, n_dropped were filtered out, while this step's groups were made.
    age: mean over samples of completed train steps since the oldest token; oldest: the largest. lengths: new tokens of
    the samples at equal steps of probability, rising; none where nothing was generated.
    """

    step: int
    metrics: dict[str, dict[str, Metric]]
    spans: dict[str, CallSpan]
    n_groups: int
    n_samples: int
    n_tokens: int
    n_new_tokens: int
    n_skipped: int
    n_dropped: int
    age: Mean
    oldest: int
    versions: dict[str, int]
    transcripts: tuple[str, ...]
    lengths: tuple[int, ...] = ()


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


class Halt(Struct, frozen=True, tag=True):
    """The run has ended: in order where `error` is None. Nothing follows."""

    error: Failed | None
    reason: str


Action = Send | StepEnded | EvalEnded | CheckpointWritten | Halt
