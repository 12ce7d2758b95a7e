"""Discrete-event fake workers that drive the very Scheduler that sockets drive, and check all that it asks of them."""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from realgraph.graphs.graph import INPUT, Graph, Key
from realgraph.graphs.keys import GENERATED, KeyType
from realgraph.graphs.maths import CrossEntropy, Loss, PolicyGradient, Preference, Term
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, ModelRole, Train
from realgraph.planner.cluster import Cluster
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.plan import Allocation, Hashes, Plan, Turn
from realgraph.runtime.actions import (
    Action,
    CheckpointWritten,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    StopRequested,
    Tick,
    WorkerLost,
)
from realgraph.runtime.job import BatchSpec, CheckpointSpec, DataSpec, EvalSpec, Job, RuntimeSpec
from realgraph.runtime.program import shares_weights
from realgraph.runtime.protocol import (
    Command,
    Done,
    Drop,
    Evaluate,
    Execute,
    Failed,
    Generated,
    Load,
    Loaded,
    Mean,
    Reallocate,
    Sample,
    Save,
    Submit,
)
from realgraph.runtime.scheduler import Scheduler

# --- graphs, plans and jobs by hand -----------------------------------------------------------------------------------

_TYPES = {
    **GENERATED,
    "prompt": KeyType("group", "tokens"),
    "answer": KeyType("group", "text"),
    "reward": KeyType("sample", "float32"),
    "keep": KeyType("group", "bool"),
    "score": KeyType("sample", "float32"),
    "shaped": KeyType("sample", "float32"),
    "advantages": KeyType("token", "float32"),
    "returns": KeyType("token", "float32"),
    "values": KeyType("token", "float32"),
    "ref_logprobs": KeyType("token", "float32"),
    "logp": KeyType("token", "float32"),
    "bonus": KeyType("sample", "float32"),
}
Row = tuple[str, ModelCall, tuple[str, ...], tuple[str, ...]]  # name, call, reads, writes


def build_graph(rows: list[Row], inputs: tuple[str, ...], samples_per_group: int) -> Graph:
    """A Graph from its calls in topological order."""
    producer = dict.fromkeys(inputs, INPUT)
    for name, _, _, writes in rows:
        producer.update(dict.fromkeys(writes, name))
    consumers: dict[str, list[str]] = defaultdict(list)
    for name, _, reads, _ in rows:
        for key in reads:
            consumers[key].append(name)
    keys = {key: Key(key, _TYPES[key], made_by, tuple(consumers[key])) for key, made_by in producer.items()}
    calls = {name: call for name, call, _, _ in rows}
    models = {
        call.model: ModelRole(trainable=isinstance(call, Train))
        for call in calls.values()
        if isinstance(call, Generate | Inference | Train)
    }
    reads, writes = {row[0]: row[2] for row in rows}, {row[0]: row[3] for row in rows}
    return Graph("test", calls, models, keys, reads, writes, (), samples_per_group)


def _train(model: str, minibatches: int, epochs: int, term: Term) -> Train:
    return Train(model=model, loss=Loss(terms={"term": term}), minibatches=minibatches, epochs=epochs)


@dataclass
class Shape:
    """What random jobs are made of; every field has the plainest value."""

    algorithm: str = "grpo"  # grpo, ppo, sft, dpo, generate, distill
    filtered: bool = False
    two_stage: bool = False  # a second streaming function after the first
    n_workers: int = 2
    split: bool = False  # generation on meshes of its own (two workers or more)
    fsdp: bool = False
    floating: bool = False  # ppo: critic train beside the next generation
    groups: int = 4
    n: int = 2
    minibatches: int = 1
    epochs: int = 1
    staleness: int = 0
    overdue: str = "mask"
    steps: int = 3
    checkpoint_every: int = 0
    eval_every: int = 0
    seed: int = 0
    tp: int = 1


def graph_of(shape: Shape) -> Graph:
    """The calls of the shape's algorithm."""
    generated = tuple(GENERATED)
    behaviour = ("tokens", "mask", "behaviour_logprobs", "versions")
    generate = "teacher" if shape.algorithm == "distill" else "actor"
    if shape.algorithm == "sft":
        return build_graph(
            [("train", _train("actor", shape.minibatches, shape.epochs, CrossEntropy()), ("tokens", "mask"), ())],
            ("tokens", "mask"),
            1,
        )
    if shape.algorithm == "dpo":
        return build_graph(
            [
                ("ref_logp", Inference("ref", "logprobs", ("ref_logprobs",)), ("tokens",), ("ref_logprobs",)),
                (
                    "train",
                    _train("actor", shape.minibatches, shape.epochs, Preference()),
                    ("tokens", "mask", "ref_logprobs"),
                    (),
                ),
            ],
            ("tokens", "mask"),
            2,
        )
    rows: list[Row] = [("rollout", Generate(generate, n=shape.n), ("prompt",), generated)]
    rows.append(("reward", Function("score", timeout_seconds=5.0), ("text", "answer"), ("reward",)))
    if shape.two_stage:
        rows.append(("bonus", Function("bonus"), ("reward", "text"), ("bonus",)))
        rows.append(("other", Function("other", over="group"), ("text",), ()))
    if shape.filtered:
        rows.append(("filter", Function("filter", over="group"), ("reward",), ("keep",)))
    if shape.algorithm == "generate":
        return build_graph(rows, ("prompt", "answer"), shape.n)
    train = _train("actor", shape.minibatches, shape.epochs, PolicyGradient())
    if shape.algorithm == "distill":
        student = _train("student", shape.minibatches, shape.epochs, PolicyGradient())
        return build_graph([*rows, ("train", student, behaviour, ())], ("prompt", "answer"), shape.n)
    rows.append(("ref_logp", Inference("ref", "logprobs", ("ref_logprobs",)), ("tokens",), ("ref_logprobs",)))
    if shape.algorithm == "grpo":
        rows.append(("advantage", Advantage({}), ("reward", "tokens", "mask"), ("advantages",)))
        rows.append(("train", train, (*behaviour, "advantages", "ref_logprobs"), ()))
        return build_graph(rows, ("prompt", "answer"), shape.n)
    rows.append(("values", Inference("critic", "values", ("values",)), ("tokens",), ("values",)))
    rows.append(("scores", Inference("judge", "scores", ("score",)), ("tokens",), ("score",)))
    rows.append(("recompute", Inference("actor", "logprobs", ("logp",)), ("tokens",), ("logp",)))
    rows.append(("shape", Function("shape"), ("reward", "score"), ("shaped",)))
    rows.append(
        (
            "advantage",
            Advantage({}),
            ("shaped", "values", "ref_logprobs", "tokens", "mask"),
            ("advantages", "returns"),
        )
    )
    rows.append(("train", train, (*behaviour, "advantages", "ref_logprobs", "logp"), ()))
    critic = _train("critic", shape.minibatches, shape.epochs, PolicyGradient())
    rows.append(("critic_train", critic, ("tokens", "mask", "values", "returns"), ()))
    return build_graph(rows, ("prompt", "answer"), shape.n)


def plan_of(shape: Shape, graph: Graph) -> Plan:
    """Calls colocated or split over disjoint meshes; every device runs its calls in topological order."""
    n, half = shape.n_workers, shape.n_workers // 2
    split = shape.split and half > 0
    tp = shape.tp if (half if split else n) % shape.tp == 0 else 1
    allocations: dict[str, Allocation] = {}
    for name, call in graph.calls.items():
        if not isinstance(call, Generate | Inference | Train):
            continue
        mesh = DeviceMesh(0, n)
        if split:
            mesh = (
                DeviceMesh(0, half) if isinstance(call, Generate) or call.model == "critic" else DeviceMesh(half, half)
            )
        sharding = "fsdp" if shape.fsdp and graph.models[call.model].trainable else "replicated"
        layout = Layout(mesh, dp=mesh.n_devices // tp, tp=tp, sharding=sharding)
        allocations[name] = Allocation(layout, 4096, seconds=1.0)
    orders = {}
    for device in range(n):
        turns = [Turn(name) for name, a in allocations.items() if device in a.layout.mesh.devices]
        if shape.floating and {"rollout", "critic_train"} <= {turn.call for turn in turns}:
            turns = [turn for turn in turns if turn.call != "critic_train"]
            at = next(i for i, turn in enumerate(turns) if turn.call == "rollout")
            turns.insert(at + 1, Turn("critic_train", -1))
        orders[device] = tuple(turns)
    return Plan(allocations, orders, Hashes("", "", ""))


def job_of(shape: Shape, plan: Plan | None = None) -> Job:
    """The job of a shape."""
    graph = graph_of(shape)
    return Job(
        name="test",
        graph=graph,
        plan=plan or plan_of(shape, graph),
        cluster=Cluster(1, shape.n_workers, "cpu", 10**9, 10**9, 1.0, 1.0, 1.0, 1.0, 1.0),
        data=DataSpec("rows.jsonl"),
        batch=BatchSpec(groups=shape.groups),
        steps=shape.steps,
        seed=shape.seed,
        run_dir="/run",
        user_dir="/user",
        staleness=shape.staleness,
        overdue=shape.overdue,
        eval=EvalSpec(every=shape.eval_every) if shape.eval_every else None,
        checkpoint=CheckpointSpec(every=shape.checkpoint_every),
        runtime=RuntimeSpec(min_deadline_seconds=1000.0),
    )


# --- the workers ------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """One fake worker: keys of its store by sample, weights of its copies, groups still to make."""

    store: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    making: set[int] = field(default_factory=set)
    copies: dict[str, int] = field(default_factory=dict)  # call -> version


@dataclass(order=True)
class Planned:
    """An event that is to come."""

    time: float
    number: int
    event: Event = field(compare=False)
    before: Callable[[], None] | None = field(default=None, compare=False)  # what the worker did by then


class Simulator:
    """Runs a Scheduler to its Halt. Random durations come from `rng`; what is kept and skipped only from the seed."""

    def __init__(self, shape: Shape, rng: random.Random, scheduler: Scheduler | None = None, keep: float = 0.7) -> None:
        self.shape, self.rng, self.keep = shape, rng, keep
        self.job = job_of(shape)
        self.graph = self.job.graph
        self.scheduler = scheduler or Scheduler(self.job, range(shape.n_workers), 1000, None, 5)
        self.workers = {number: Worker() for number in range(shape.n_workers)}
        self.now = 0.0
        self.events: list[Planned] = []
        self.n_planned = self.n_events = 0
        state = self.scheduler.state
        self.versions = dict(state.versions)
        self.step = state.step
        self.version_started = dict(self.versions)
        self.submitted: dict[int, int] = {}  # group -> worker
        self.discarded: set[int] = set()
        self.trained: dict[int, set[str]] = defaultdict(set)  # group -> train calls that took it
        self.final: dict[int, str] = {}
        self.holding: dict[int, int] = {}  # device -> task
        self.awaited: dict[int, set[int]] = {}  # task -> workers
        self.batches: dict[tuple[int, str], list[tuple[tuple[int, ...], ...]]] = {}
        self.actions: list[Action] = []
        self.log: list[Send] = []
        self.halt: Halt | None = None
        self.leaving: set[int] = set()  # groups dropped by a step that ends
        self.failing: Callable[[Command], Failed | None] = lambda command: None
        trainers = {call.model: name for name, call in self.graph.calls.items() if isinstance(call, Train)}
        self.trainer = {
            name: trainers[call.model]
            for name, call in self.graph.calls.items()
            if isinstance(call, Generate | Inference) and call.model in trainers
        }

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, max_events: int = 10**9) -> Halt | None:
        """Until the Halt, or so many events."""
        if not self.n_events:
            self.take(self.scheduler.start(self.now))
        while self.halt is None and self.n_events < max_events:
            self.advance()
        return self.halt

    def advance(self) -> None:
        """One event."""
        assert self.events, "the Scheduler awaits nothing and has not halted"
        planned = heapq.heappop(self.events)
        self.now = max(self.now, planned.time)
        if planned.before is not None:
            planned.before()
        self.feed(planned.event)

    def feed(self, event: Event) -> None:
        """Give the Scheduler an event now, carry out what it says, check what must be true."""
        self.n_events += 1
        self.take(self.scheduler.on(event, self.now))
        self.scheduler.check()
        if self.halt is None:
            deadline = self.scheduler.deadline()
            assert deadline is not None, "the Scheduler waits without a deadline"
            assert deadline > self.now

    def plan(self, event: Event, delay: float, before: Callable[[], None] | None = None) -> None:
        """`event` comes after `delay` seconds."""
        self.n_planned += 1
        heapq.heappush(self.events, Planned(self.now + delay, self.n_planned, event, before))

    def take(self, actions: list[Action]) -> None:
        """Carry actions out."""
        for action in actions:
            assert self.halt is None, f"{action} after the Halt"
            self.actions.append(action)
            match action:
                case Send():
                    self.log.append(action)
                    self.command(action.worker, action.command)
                case StepEnded():
                    self.step_ended(action)
                case Halt():
                    self.halt = action
                case CheckpointWritten():
                    assert action.state.step == action.step == self.step
                    per_step = defaultdict(int)
                    for call in self.graph.calls.values():
                        if isinstance(call, Train):
                            per_step[call.model] += 1
                    assert action.state.versions == {role: n * self.step for role, n in per_step.items()}
                case EvalEnded():
                    assert "reward" in action.metrics

    # --- commands -----------------------------------------------------------------------------------------------------

    def command(self, number: int, command: Command) -> None:
        """A worker gets a command."""
        failure = self.failing(command)
        if failure is not None:
            self.plan(failure, self.rng.random())
            return
        worker = self.workers[number]
        match command:
            case Submit():
                self.check_weights(number, command.call, command.version)
                self.make(number, command.groups, command.version)
            case Load():
                self.make(number, command.groups, 0)
            case Execute():
                self.execute(number, command)
            case Reallocate():
                self.answer(number, command.task, command.call, lambda: self.reallocated(worker, command))
                self.hold(number, command.task)
                assert command.version == self.versions[command.role]
            case Drop():
                for group in command.groups:
                    self.drop(worker, group)
            case Save():
                assert not self.holding, "a checkpoint while a call runs"
                self.answer(number, command.task, "", None)
            case Evaluate():
                self.check_weights(number, "rollout", command.version)
                self.hold(number, command.task)
                self.answer(number, command.task, "evaluate", None, {"reward": Mean(self.rng.random())})

    def hold(self, device: int, task: int) -> None:
        """A mesh-holding task takes a device: nothing else may have it."""
        assert self.holding.get(device, task) == task, f"tasks {task} and {self.holding[device]} meet on {device}"
        self.holding[device] = task

    def answer(
        self,
        number: int,
        task: int,
        call: str,
        before: Callable[[], None] | None,
        metrics: dict[str, Mean] | None = None,
        kept: dict[int, bool] | None = None,
    ) -> None:
        """`Done` after a random while."""
        self.awaited.setdefault(task, set()).add(number)

        def ended() -> None:
            self.awaited[task].discard(number)
            if self.holding.get(number) == task:
                self.holding[number] = -task - 1  # free only when the whole mesh is
            if not self.awaited[task]:
                for device in [d for d, t in self.holding.items() if t in (task, -task - 1)]:
                    del self.holding[device]
            if before is not None:
                before()

        state = {"coef": float(task)} if call == "advantage" else {}
        done = Done(number, task, call, metrics or {}, state, kept or {}, self.now, self.now + 1)
        self.plan(done, self.rng.expovariate(1.0), ended)

    def check_weights(self, number: int, call: str, version: int) -> None:
        """The weights that `call` would use on this worker are those it names."""
        if call not in self.trainer:
            assert version == 0
            return
        layouts = {name: a.layout for name, a in self.job.plan.allocations.items()}
        trainer = self.trainer[call]
        role = self.graph.role(call)
        if shares_weights(layouts[trainer], layouts[call], isinstance(self.graph.calls[call], Generate)):
            held = self.versions[role]
        else:
            held = self.workers[number].copies.get(call, 0)
        assert held >= version, f"{call} would run on version {held}, not {version}"

    def make(self, number: int, groups: tuple[int, ...], version: int) -> None:
        """Generate or load groups; they come back in random batches."""
        worker = self.workers[number]
        assert groups
        for group in groups:
            assert group not in self.submitted, f"group {group} was handed out twice"
            assert group not in self.final
            self.submitted[group] = number
        worker.making.update(groups)
        left = list(groups)
        self.rng.shuffle(left)
        while left:
            size = self.rng.randint(1, len(left))
            part, left = left[:size], left[size:]
            self.plan_groups(number, part, version)

    def plan_groups(self, number: int, part: list[int], version: int) -> None:
        worker, n = self.workers[number], self.graph.samples_per_group
        good = tuple(group for group in part if self.lot(group, "skip") >= 0.05)
        skipped = tuple(group for group in part if group not in good)
        samples = []
        for group in good:
            for index in range(n):
                length = 1 + int(100 * self.lot(group * n + index, "length") ** 3)
                samples.append(Sample(group * n + index, length, length // 2, oldest=version))
        self.rng.shuffle(samples)

        def made() -> None:
            for group in part:
                worker.making.discard(group)
            for group in skipped:
                self.discard(group)
            for key in self.graph.keys.values():
                if key.producer in (INPUT, "rollout"):
                    worker.store[key.name].update(sample.sample for sample in samples)

        ready = tuple(samples)
        if "rollout" in self.graph.calls:
            event: Event = Generated(number, "rollout", good, ready, {"len": Mean(1.0)}, skipped, 0.0, self.now)
        else:
            event = Loaded(number, good, ready, skipped)
        self.plan(event, 3 * self.rng.expovariate(1.0), made)

    def lot(self, number: int, what: str) -> float:
        """A random number that depends on nothing but the seed, `number` and `what`."""
        return random.Random(f"{self.shape.seed} {what} {number}").random()

    def discard(self, group: int) -> None:
        assert group not in self.final
        self.final[group] = "discarded"
        self.discarded.add(group)

    def execute(self, number: int, command: Execute) -> None:
        """Check that a call may run on this worker, and answer later."""
        call, n = self.graph.calls[command.call], self.graph.samples_per_group
        samples = {sample for share in command.shares for sample in share}
        self.check_sources(command, samples)
        held = isinstance(call, Inference | Train)
        if held:
            self.hold(number, command.task)
            self.check_mesh_call(number, command)
        kept: dict[int, bool] = {}
        if "keep" in self.graph.writes[command.call]:
            kept = {group: self.lot(group, "keep") < self.keep for group in {sample // n for sample in samples}}
        for sample in samples:
            assert self.final.get(sample // n) in (None, "discarded"), "a call on a group that is finished"

        def ended() -> None:
            for key in self.graph.writes[command.call]:
                self.workers[number].store[key].update(samples)
            for group, keep in kept.items():
                if not keep:
                    self.discard(group)
            if isinstance(call, Train) and not self.awaited[command.task]:
                self.versions[call.model] += 1

        self.answer(number, command.task, command.call, ended, {"n": Mean(float(len(samples)))}, kept)

    def check_sources(self, command: Execute, samples: set[int]) -> None:
        """Every key of every sample is named once, and lies where the command says."""
        wanted = {(key, sample) for key in self.graph.reads[command.call] for sample in samples}
        named: set[tuple[str, int]] = set()
        for source in command.sources:
            for key in source.keys:
                held = self.workers[source.worker].store[key]
                for sample in source.samples:
                    assert (key, sample) not in named
                    named.add((key, sample))
                    assert sample in held, f"{command.call}: {key} of sample {sample} not on worker {source.worker}"
        assert named == wanted

    def check_mesh_call(self, number: int, command: Execute) -> None:
        call = self.graph.calls[command.call]
        role = self.graph.role(command.call)
        if self.shape.staleness == 0 and self.shape.algorithm != "distill":
            assert not self.workers[number].making, "a call on a device that still generates"
        if isinstance(call, Inference):
            self.check_weights(number, command.call, command.version)
        if role in self.versions:
            assert command.version == command.step == self.versions[role], "a call on stale or future weights"
        else:
            assert command.version == 0
        self.batches.setdefault((command.step, command.call), []).append(command.shares)
        assert all(share == tuple(sorted(share)) for share in command.shares)

    def reallocated(self, worker: Worker, command: Reallocate) -> None:
        worker.copies[command.call] = command.version

    def drop(self, worker: Worker, group: int) -> None:
        """The worker forgets a group: it was left out, or its step is about to end."""
        n = self.graph.samples_per_group
        if self.final.setdefault(group, "trained") == "trained":
            self.leaving.add(group)
        for held in worker.store.values():
            held.difference_update(range(group * n, group * n + n))

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_ended(self, ended: StepEnded) -> None:
        """The batch of a step was whole, balanced, the same for all calls, and is trained exactly once."""
        assert ended.step == self.step
        assert ended.n_groups == self.shape.groups
        self.step += 1
        n = self.graph.samples_per_group
        batches = []
        for name, call in self.graph.calls.items():
            if not isinstance(call, Inference | Train):
                continue
            shares = self.batches.pop((ended.step, name))
            epochs = call.epochs if isinstance(call, Train) else 1
            cuts = call.minibatches * epochs if isinstance(call, Train) else 1
            tp = self.job.plan.allocations[name].layout.tp
            assert all(len(share) == cuts for share in shares)
            samples = sorted(sample for share in shares for part in share for sample in part)
            whole = samples[:: epochs * tp]
            assert samples == sorted(whole * (epochs * tp))
            batches.append(tuple(whole))
        assert len(set(batches)) <= 1
        trained = {sample // n for sample in batches[0]} if batches else set(self.leaving)
        assert len(trained) == self.shape.groups
        for group in self.leaving - trained:
            assert self.shape.overdue == "drop", f"group {group} was dropped, but neither trained nor filtered out"
            self.final[group] = "discarded"
        assert trained <= self.leaving
        if batches:
            assert batches[0] == tuple(group * n + index for group in sorted(trained) for index in range(n))
        self.leaving.clear()

    def fault(self, worker: int) -> None:
        """A worker is lost now."""
        self.feed(WorkerLost(worker, "killed by signal 9"))

    def stop(self) -> None:
        """The user asks for an end."""
        self.feed(StopRequested())

    def tick(self) -> None:
        """Time passes to the deadline."""
        deadline = self.scheduler.deadline()
        assert deadline is not None
        self.now = deadline
        self.feed(Tick())
