"""The runtime's order: a checked graph, its plan, and the settings of a run. Plain data, no torch."""

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import MOST_SAMPLES, Generate
from realgraph.planner.costs.memory.margin import MemorySpec
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.axes import head_worker
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.pins import Pin
from realgraph.runtime.job.manifest import FileSum
from realgraph.runtime.job.rollout import RolloutSpec

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
TrackerName = Literal["wandb", "mlflow", "trackio"]
DEFAULT_MINUTES = 10.0  # between two checkpoints: what a kill without warning may cost


class DataSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A data set: a JSON, CSV or parquet file (or a folder or glob of them), or a Hub id read through `datasets`.

    JSON is one object a line, or one array of them. It and CSV may be compressed (`.gz`, `.zst`).

    `columns` maps a graph input to a column, or to a value within one: `reward_model.ground_truth`. A graph whose input
    is `tokens` (SFT) takes the columns `prompt` and `response`, or `messages`. A prompt column holds text or a list of
    chat messages; `chat` wraps text as a user turn. Where chats are rendered, a column `tools` (or the one that
    `columns.tools` names) gives a row its own tools.
    """

    path: str  # file, folder or glob, relative to the run file; or a Hub id
    split: str = "train"  # of a Hub data set, or of a folder whose files are named by split
    subset: str | None = None  # configuration of a Hub data set
    columns: dict[str, str] = field(default_factory=dict)  # input of the graph -> column; default: of that name
    limit: Count | None = None  # first rows only
    shuffle: bool = True  # a new seeded permutation every epoch
    chat: bool | None = None  # apply the tokenizer's chat template to text prompts; default: where it has one
    system: str | None = None  # system message before the prompt; needs a chat template
    template_args: dict[str, Any] = field(default_factory=dict)  # of the chat template, such as enable_thinking
    tools: tuple[dict[str, Any], ...] | None = None  # JSON schemas of tools, for the chat template
    max_prompt_tokens: Count = 1024  # longest prompt; memory is planned for it
    too_long: Literal["drop", "truncate_left", "fail"] = (
        "drop"  # prompts over max_prompt_tokens; sequences over it + batch.max_new_tokens
    )
    truncated: Literal["keep", "mask"] = "keep"  # samples cut at max_new_tokens: train on them, or leave them out


class BatchSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A step: `groups` prompts, each with the graph's n samples of at most `max_new_tokens`."""

    groups: Count = 64  # data rows a step
    oversample: Annotated[float, Meta(ge=1, le=100)] = 1.0  # groups begun a step, over `groups`: the first are trained
    max_new_tokens: Count = 256  # longest response
    max_tokens_per_microbatch: Count | None = None  # default: the planner's choice from memory
    expected_new_tokens: Count | None = None  # mean length for the planner; default: half of max_new_tokens

    @property
    def surplus(self) -> int:
        """Groups that are begun beyond those of a step: 64 x 1.25 are 16 more."""
        return math.ceil(self.groups * (self.oversample - 1) - 1e-9)


EvalOn = Literal["engine", "interleaved", "checkpoint"]


class EvalSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Held-out evaluation every `every` steps: n samples a prompt, scored as the graph scores them; best checkpoint
    kept. Of a graph that generates nothing: the loss of the held-out rows, and what it measures.

    `call` is a function over samples, or a model's scores; calls that it reads of, models' too, come before it.
    `on`: of asynchronous runs, whose training and generation go on meanwhile: `engine`: the last data-parallel replica
    of the call that generates evaluates, and keeps its weights until then; `interleaved`: all do, beside the groups
    that they are making. By default all of the run stands still. `checkpoint`: that replica evaluates each checkpoint
    that is saved, from its files; then checkpoints say when, and `every` is left out. See `docs/async.md`.
    """

    every: Annotated[int, Meta(ge=0)] = 0  # 0: only `realgraph eval`
    data: DataSpec | None = None  # default: the training data's `test` split; what it leaves out is as in `data`
    n: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1  # samples a prompt
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # 0 is greedy; of the whole vocabulary, without top_p and top_k
    k: tuple[Count, ...] = (1,)  # pass@k, unbiased (arXiv:2107.03374, eq. 1)
    threshold: float | None = None  # the least reward that is right; default: 0.5 of a function's, none of a model's
    limit: Count | None = None  # first rows only
    call: str = ""  # the call that scores; default: reward, else what writes an advantage's reward
    key: str = ""  # of `call`, that judges; default: what an advantage takes for the reward, else its first number
    at_start: bool = True  # also before the first step
    on: EvalOn | None = None  # engines that evaluate while an asynchronous run goes on; default: it waits

    @property
    def active(self) -> bool:
        """True where a run evaluates."""
        return bool(self.every) or self.on == "checkpoint"


class CheckpointSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint every `every` steps or every `minutes`, whichever is given, and one at the end.

    Where neither is, every 10 minutes. By time, the first step to end after so many minutes is saved.
    """

    every: Annotated[int, Meta(ge=0)] = 0  # steps; 0: by time only
    minutes: Annotated[float, Meta(ge=0)] | None = None  # since the last; 0: never; default: 10 unless `every` is set
    keep: Count = 2  # older ones are deleted; the best one stays

    @property
    def seconds(self) -> float:
        """Between two checkpoints by time; 0 where time is not looked at."""
        minutes = (0.0 if self.every else DEFAULT_MINUTES) if self.minutes is None else self.minutes
        return minutes * 60

    @property
    def text(self) -> str:
        """`every 10 minutes and at the end`."""
        times = [f"every {self.every} steps" if self.every > 1 else "every step"] if self.every else []
        times += [f"every {self.seconds / 60:g} minutes"] if self.seconds else []
        return " and ".join([*times, "at the end"])


class OutputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Files that a run writes besides metrics.jsonl, logs, transcripts, trace.json and checkpoints."""

    dir: str | None = None  # relative to the run file; default: runs/<name>-<date> where the command is run
    tensorboard: bool = False  # write event files
    trackers: tuple[TrackerName, ...] = ()  # services that get the metrics too
    project: str = "realgraph"  # name of the project there
    transcripts_every: Annotated[int, Meta(ge=0)] = 10  # steps
    transcripts: Annotated[int, Meta(ge=0)] = 4  # groups each time, with their first sample
    audit: bool = False  # write which tokens of which age every loss has used, to audit/worker-N.jsonl
    rotate_mb: Count = 64  # of a worker's log, of transcripts.jsonl and of trace.json: a full one is kept, an older not


class RuntimeSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines and processes. Deadlines are multiples of the predicted seconds, never under the minimum."""

    deadline_factor: Annotated[float, Meta(gt=1)] = 20.0  # times the predicted seconds of a call
    min_deadline_seconds: Seconds = 120.0  # of any call
    start_seconds: Seconds = 180.0  # for a worker to load and dial in
    heartbeat_seconds: Seconds = 1.0  # between two signs of life of a worker
    lost_after_seconds: Seconds = 15.0  # without a sign of life
    function_processes: Count = 1  # subprocesses for functions, per worker
    function_max_processes: Count = 256  # that one of those and all it starts may be: above that they are killed
    max_logprob_gap: Seconds | None = (
        None  # nats: mean |behaviour - recomputed| at each weight update; default by dtype
    )
    verify_weights: Annotated[int, Meta(ge=0)] | Literal["first", "off"] = (
        "off"  # compare checksums of both sides at every so many updates of a copy of weights, the first, or none (0)
    )
    threads: Count = 1  # CPU threads of a worker
    restarts: Annotated[int, Meta(ge=0)] = 0  # times that a run goes on by itself after a lost worker or host

    def deadline(self, predicted_seconds: float) -> float:
        """Seconds that may go by until a call ends that is predicted to take so long."""
        return max(self.min_deadline_seconds, self.deadline_factor * predicted_seconds)

    @property
    def verified_updates(self) -> int | Literal["first"]:
        """Checksums are compared at every so many updates of a copy; 0: at none."""
        return 0 if self.verify_weights == "off" else self.verify_weights

    def verifies(self, update: int) -> bool:
        """True where checksums are compared at this update of a copy, counted from 1."""
        every = self.verified_updates
        return update == 1 if every == "first" else bool(every) and update % every == 0


class SearchSpec(Struct, frozen=True):
    """Sections of the run file that nothing but the search for a plan follows."""

    allocation: dict[str, Pin]
    constraints: Constraints
    memory: MemorySpec


class Job(Struct, frozen=True):
    """Everything a run needs, as sent to every worker."""

    name: str
    graph: Graph
    plan: Plan
    cluster: Cluster
    data: DataSpec
    batch: BatchSpec
    steps: int
    seed: int
    run_dir: str  # absolute
    user_dir: str  # absolute: where `module:function` names are imported from
    staleness: int = 0  # the bound; the plan may keep to less
    gives_up_caches: bool = False  # a stream that generates has none while other calls have its devices
    overdue: Literal["mask", "wait", "drop", "allow"] = "mask"
    eval: EvalSpec | None = None
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    outputs: OutputSpec = field(default_factory=OutputSpec)
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    params: dict[str, Any] = field(default_factory=dict)
    rollout_alone: bool = False  # its training is left out, to measure: neither checkpoints nor samples are kept
    search: SearchSpec | None = None  # what the plan was searched under
    data_sums: dict[str, FileSum] = field(default_factory=dict)  # local data file -> checksum at the start
    eval_sums: dict[str, FileSum] = field(default_factory=dict)  # the same of the held-out data
    frozen_sums: dict[str, dict[str, FileSum]] = field(default_factory=dict)  # role -> the same of its weights' samples

    @property
    def held_out(self) -> DataSpec | None:
        """The data of evaluations: as the run says, else the `test` split of its training data; None where it has no
        evaluation."""
        if self.eval is None or (self.eval.data is None and not self.eval.active):
            return None
        return self.eval.data or replace(self.data, split="test", limit=None)

    def max_running(self, call: str) -> int | None:
        """Sequences that an engine of a generate call decodes at once, at most: the user's number, or the plan's; None
        where neither says."""
        return self.rollout.max_running or self.plan.allocations[call].most_running or None

    def function_processes(self, worker: int) -> int:
        """Subprocesses for functions of a worker: its own, and on the head of a rank that generates, whose groups it
        has, those of the rank's other workers, which have none."""
        own = self.runtime.function_processes
        for name, call in self.graph.calls.items():
            if isinstance(call, Generate):
                layout = self.plan.allocations[name].layout
                if worker in (head_worker(layout, rank) for rank in range(layout.dp)):
                    return own * layout.mesh.n_devices // layout.dp
        return own
