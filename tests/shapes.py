"""Jobs for the Scheduler's tests and benchmark: graphs and plans built by hand, from a few random choices."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from realgraph.graphs.functions import KEEP, judging_keys, least_samples, sample_filter
from realgraph.graphs.graph import INPUT, Graph, Key
from realgraph.graphs.keys import GENERATED, KeyType
from realgraph.graphs.maths import CrossEntropy, Loss, PolicyGradient, Preference, Term
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, ModelRole, Train
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import Allocation, Hashes, Plan, Turn, reallocation_node
from realgraph.planner.plan.residency import reallocations
from realgraph.runtime.job.evaluations import eval_on_mistake
from realgraph.runtime.job.job import BatchSpec, CheckpointSpec, DataSpec, EvalOn, EvalSpec, Job, RuntimeSpec
from realgraph.runtime.job.rollout import Interrupt, RolloutSpec
from realgraph.runtime.job.samples import with_gathering

_TYPES = {
    **GENERATED,
    "prompt": KeyType("group", "tokens"),
    "answer": KeyType("group", "text"),
    "reward": KeyType("sample", "float32"),
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
    calls = {name: call for name, call, _, _ in rows}
    types = _TYPES | {KEEP: KeyType("sample" if sample_filter(calls) else "group", "bool")}
    keys = {key: Key(key, types[key], made_by, tuple(consumers[key])) for key, made_by in producer.items()}
    models = {
        call.model: ModelRole(trainable=isinstance(call, Train))
        for call in calls.values()
        if isinstance(call, Generate | Inference | Train)
    }
    read = {row[0]: row[2] for row in rows}
    written = {row[0]: row[3] for row in rows}
    least = least_samples(calls, samples_per_group)
    return Graph("test", calls, models, keys, read, written, (), samples_per_group, least_samples=least)


def _train(model: str, minibatches: int, epochs: int, term: Term) -> Train:
    return Train(model=model, loss=Loss(terms={"term": term}), minibatches=minibatches, epochs=epochs)


@dataclass
class Shape:
    """The choices that a random job is made of; every field has the plainest value."""

    algorithm: str = "grpo"  # grpo, ppo, sft, dpo, generate, distill, twin (distill into two); or of `generating.py`
    filtered: bool = False
    varied: bool = False  # the filter leaves samples out, each for itself
    least: int | None = None  # of a group that goes on then
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
    spare: int = 0  # steps of the staleness bound that the plan does not use
    overdue: Literal["mask", "wait", "drop", "allow"] = "mask"
    interrupt: Interrupt = "recompute"
    steps: int = 3
    checkpoint_every: int = 0
    eval_every: int = 0
    seed: int = 0
    tp: int = 1
    moves: bool = False  # reallocations have turns of their own
    again: bool = False  # grpo, ppo: a second train call of the actor
    late: Literal["", "sample", "group"] = ""  # grpo: a function over samples or groups that reads an inference call
    slow: float = 0.0  # share of the parts of a submission that take ten times as long to make
    eval_on: EvalOn | None = None  # where the plan allows it
    scored_by: str = ""  # ppo: the call that scores held-out samples, "" for the default
    checkpoint_seconds: float = 0.0  # simulated; 0: by steps only
    oversample: float = 1.0  # where samples are generated and trained on

    @property
    def kept(self) -> int:
        """The staleness that the plan keeps to."""
        return max(0, self.staleness - self.spare)

    @property
    def begun(self) -> float:
        """The groups begun a step, over those trained."""
        return 1.0 if self.algorithm in ("sft", "dpo", "generate") else self.oversample

    def lot(self, number: int, what: str) -> float:
        """A random number that depends on nothing but the seed, `number` and `what`."""
        return _lot(self.seed, what, number)

    def length(self, sample: int, later: str = "") -> int:
        """Tokens of a sample; later: the generate call that made it, if not the first of its group."""
        return 1 + int(100 * self.lot(sample, f"length{later}") ** 3)


@lru_cache(maxsize=4096)
def _lot(seed: int, what: str, number: int) -> float:
    return random.Random(f"{seed} {what} {number}").random()


def filter_of(shape: Shape) -> Function:
    """The function that filters groups, or samples."""
    least = min(shape.least, shape.n) if shape.varied and shape.least else None
    level = "sample bool" if shape.varied else "group bool"
    return Function("m:f", ("reward",), {KEEP: level}, over="group", min_samples=least)


def graph_of(shape: Shape) -> Graph:
    """The calls of the shape's algorithm."""
    generated = tuple(GENERATED)
    behaviour = ("tokens", "mask", "behaviour_logprobs", "versions")
    generate = "teacher" if shape.algorithm in ("distill", "twin") else "actor"
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
    score = Function("score", writes={"reward": "sample float32"}, timeout_seconds=5.0)
    rows.append(("reward", score, ("text", "answer"), ("reward",)))
    if shape.two_stage:
        rows.append(("bonus", Function("bonus"), ("reward", "text"), ("bonus",)))
        rows.append(("other", Function("other", over="group"), ("text",), ()))
    if shape.filtered:
        rows.append(("filter", filter_of(shape), ("reward",), ("keep",)))
    if shape.algorithm == "generate":
        rows.append(("scores", Inference("judge", "scores", ("score",)), ("tokens",), ("score",)))
        return with_gathering(build_graph(rows, ("prompt", "answer"), shape.n))
    train = _train("actor", shape.minibatches, shape.epochs, PolicyGradient())
    if generate == "teacher":
        student = _train("student", shape.minibatches, shape.epochs, PolicyGradient())
        rows.append(("train", student, behaviour, ()))
        if shape.algorithm == "twin":
            twin = _train("critic", shape.minibatches, shape.epochs, PolicyGradient())
            rows.append(("critic_train", twin, behaviour, ()))
        return build_graph(rows, ("prompt", "answer"), shape.n)
    rows.append(("ref_logp", Inference("ref", "logprobs", ("ref_logprobs",)), ("tokens",), ("ref_logprobs",)))
    if shape.algorithm == "grpo":
        if shape.late:
            rows.append(("shape", Function("shape", over=shape.late), ("reward", "ref_logprobs"), ("shaped",)))
        reward = "shaped" if shape.late else "reward"
        rows.append(("advantage", Advantage({}), (reward, "tokens", "mask"), ("advantages",)))
        rows.append(("train", train, (*behaviour, "advantages", "ref_logprobs"), ()))
        if shape.again:
            rows.append(("train_again", train, (*behaviour, "advantages"), ()))
        return build_graph(rows, ("prompt", "answer"), shape.n)
    rows.append(("values", Inference("critic", "values", ("values",)), ("tokens",), ("values",)))
    rows.append(("scores", Inference("judge", "scores", ("score",)), ("tokens",), ("score",)))
    rows.append(("recompute", Inference("actor", "logprobs", ("logp",)), ("tokens",), ("logp",)))
    shaped = Function("shape", writes={"shaped": "sample float32"})
    rows.append(("shape", shaped, ("reward", "score"), ("shaped",)))
    rows.append(
        (
            "advantage",
            Advantage({}),
            ("shaped", "values", "ref_logprobs", "tokens", "mask"),
            ("advantages", "returns"),
        )
    )
    rows.append(("train", train, (*behaviour, "advantages", "ref_logprobs", "logp"), ()))
    if shape.again:
        rows.append(("train_again", train, (*behaviour, "advantages"), ()))
    critic = _train("critic", shape.minibatches, shape.epochs, PolicyGradient())
    rows.append(("critic_train", critic, ("tokens", "mask", "values", "returns"), ()))
    return build_graph(rows, ("prompt", "answer"), shape.n)


def plan_of(shape: Shape, graph: Graph) -> Plan:
    """Calls colocated or split over disjoint meshes; every device runs its calls in topological order. Where several
    calls generate, split means that every second of them has the devices of the other calls."""
    n, half = shape.n_workers, shape.n_workers // 2
    split = shape.split and half > 0
    tp = shape.tp if (half if split else n) % shape.tp == 0 else 1
    allocations: dict[str, Allocation] = {}
    for name, call in graph.calls.items():
        if not isinstance(call, Generate | Inference | Train):
            continue
        mesh = DeviceMesh(0, n)
        if split:
            apart = call.model == "critic" or (name in graph.generates and graph.generates.index(name) % 2 == 0)
            mesh = DeviceMesh(0, half) if apart else DeviceMesh(half, half)
        sharding: Literal["replicated", "fsdp"] = (
            "fsdp" if shape.fsdp and graph.models[call.model].trainable else "replicated"
        )
        layout = Layout(mesh, dp=mesh.n_devices // tp, tp=tp, sharding=sharding)
        cache, tokens = (4096, None) if isinstance(call, Generate) else (None, 4096)
        allocations[name] = Allocation(layout, tokens, kv_cache_tokens=cache, seconds=1.0)
    orders = {}
    for device in range(n):
        turns = [Turn(name) for name, a in allocations.items() if device in a.layout.mesh.devices]
        if shape.floating and {"rollout", "critic_train"} <= {turn.call for turn in turns}:
            turns = [turn for turn in turns if turn.call != "critic_train"]
            at = next(i for i, turn in enumerate(turns) if turn.call == "rollout")
            turns.insert(at + 1, Turn("critic_train", -1))
        orders[device] = tuple(turns)
    if len(graph.generates) > 1 and shape.kept and shape.lot(0, "lag") < 0.5:  # all but the first in the next round
        lag = {name: -1 for name in allocations if name != graph.generates[0]}
        orders = {d: tuple(Turn(turn.call, lag.get(turn.call, 0)) for turn in order) for d, order in orders.items()}
    if shape.moves:
        layouts = {name: allocation.layout for name, allocation in allocations.items()}
        for target, train in reallocations(graph, allocations).items():
            for device in {*layouts[target].mesh.devices, *layouts[train].mesh.devices}:
                orders[device] = (Turn(reallocation_node(target)), *orders[device])
    return Plan(allocations, orders, Hashes("", "", ""), shape.kept)


def job_of(shape: Shape, plan: Plan | None = None, graph: Graph | None = None) -> Job:
    """The job of a shape, and of a graph that is not its algorithm's own."""
    graph = graph or graph_of(shape)
    plan = plan or plan_of(shape, graph)
    return Job(
        name="test",
        graph=graph,
        plan=plan,
        cluster=Cluster(1, shape.n_workers, "cpu", 10**9, 10**9, 1.0, 1.0, 1.0, 1.0, 1.0),
        data=DataSpec("rows.jsonl"),
        batch=BatchSpec(groups=shape.groups, oversample=shape.begun),
        steps=shape.steps,
        seed=shape.seed,
        run_dir="/run",
        user_dir="/user",
        staleness=shape.staleness,
        overdue=shape.overdue,
        rollout=RolloutSpec(interrupt=shape.interrupt),
        eval=_eval_of(shape, graph, plan) if shape.eval_every else None,
        checkpoint=CheckpointSpec(shape.checkpoint_every, shape.checkpoint_seconds / 60),
        runtime=RuntimeSpec(min_deadline_seconds=1000.0),
    )


def _eval_of(shape: Shape, graph: Graph, plan: Plan) -> EvalSpec:
    scored_by = shape.scored_by if judging_keys(graph.calls, shape.scored_by) else ""
    able = not scored_by and shape.eval_on is not None and not eval_on_mistake(graph, plan, shape.eval_on)
    on = shape.eval_on if able else None
    return EvalSpec(0 if on == "checkpoint" else shape.eval_every, n=shape.minibatches, call=scored_by, on=on)


ALGORITHMS = ["grpo", "ppo", "sft", "dpo", "generate", "distill", "twin"]


def random_shape(rng: random.Random) -> Shape:
    """Any job that the Scheduler must run."""
    return Shape(
        algorithm=rng.choice(ALGORITHMS),
        filtered=rng.random() < 0.5,
        two_stage=rng.random() < 0.5,
        n_workers=rng.choice([1, 2, 4]),
        split=rng.random() < 0.5,
        fsdp=rng.random() < 0.5,
        floating=rng.random() < 0.5,
        groups=rng.choice([2, 4, 6]),
        n=rng.choice([1, 2, 3]),
        minibatches=rng.choice([1, 1, 2]),
        epochs=rng.choice([1, 2]),
        staleness=rng.choice([0, 0, 1, 2, 3]),
        overdue=rng.choice(["mask", "wait", "drop", "allow"]),
        steps=rng.choice([1, 3, 5]),
        checkpoint_every=rng.choice([0, 1, 2]),
        eval_every=rng.choice([0, 1, 2]),
        seed=rng.randrange(10**6),
        tp=rng.choice([1, 1, 2]),
        moves=rng.random() < 0.5,
        spare=rng.choice([0, 0, 1, 2]),
        again=rng.random() < 0.3,
        slow=rng.choice([0.0, 0.0, 0.2]),
        eval_on=rng.choice([None, "engine", "interleaved", "checkpoint"]),
        oversample=rng.choice([1.0, 1.0, 1.25, 2.0]),
        varied=rng.random() < 0.5,
        least=rng.choice([None, 1, 2]),
        scored_by=rng.choice(["", "", "scores", "shape"]),
    )


def assert_balanced(length: Callable[[int], int], parts: set[tuple[int, ...]], dp: int, unit: int) -> None:
    """The `dp` ranks' parts have as many tokens, at most one unit (a sample; of pair losses: a group) apart. length: of
    a sample, by its number."""
    loads = [sum(map(length, part)) for part in parts]
    loads += [0] * (dp - len(loads))
    longest = max(map(length, [sample for part in parts for sample in part]))
    assert max(loads) - min(loads) <= unit * longest
