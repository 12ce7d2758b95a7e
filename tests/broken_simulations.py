"""Simulated asynchronous runs that are broken at random and go on: what trainers got is judged as the audit of a real
run is."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from benchmarks.audit import Promise, Start, judge
from realgraph.graphs.spec import Train
from realgraph.runtime.commands.actions import (
    Checkpointed,
    CheckpointWritten,
    Event,
    StopRequested,
    Tick,
)
from realgraph.runtime.job.audit import AuditRecord, AuditSample, AuditSpan
from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.wire.protocol import Command, Drop, Execute, Submit
from tests.resumed_runs import groups_of_steps, ledger_problems, resumed_from
from tests.shapes import Shape, random_shape
from tests.simulated_tasks import Planned
from tests.simulator import Simulator, ended_steps

LOST_SECONDS = 15.0  # silence until a worker is given up
MOST_FAULTS = 4  # of a life
MOST_EVENTS = 40  # between two faults, and once more until the moment comes
ENDLESS_EVENTS = 20_000  # more than any life has: it waits for something that never comes
# what ends a life, and what it outlives
LETHAL = ("worker killed", "worker stopped for good", "master killed", "link dropped", "run interrupted")
OUTLIVED = ("worker stopped and continued", "link delayed", "engine killed and replaced")
START_SECONDS = 5.0  # for a new process to be ready, at most
MOMENTS = ("any", "transfer", "switch", "checkpoint", "evaluation", "training")


@dataclass
class Outcome:
    """A run that was broken, to its end. faults: by kind and by the moment that they came in."""

    shape: Shape
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    n_events: int = 0
    n_old: int = 0  # steps with samples beyond the bound
    problems: tuple[str, ...] = ()


def shape_for(rng: random.Random, least: int, steps: int) -> Shape:
    """Any run of at least this staleness whose trainers can be followed worker by worker."""
    shape = random_shape(rng)
    shape.algorithm, shape.tp, shape.steps = rng.choice(["grpo", "ppo"]), 1, steps
    shape.staleness, shape.spare = rng.choice([0, 1, 2, 3, 4][least:]), 0
    shape.interrupt = rng.choice(["recompute", "keep_kv", "wait"])
    shape.slow, shape.checkpoint_every = rng.choice([0.0, 0.2]), rng.choice([1, 2])
    return shape


def broken_run(seed: int, *, lives: int = 4, least: int = 0, steps: int = 8) -> Outcome:
    """So many lives of a run, of which all but the last are ended by a fault; after the last it has finished."""
    rng = random.Random(seed)
    outcome = Outcome(shape_for(rng, least, steps))
    state: Checkpointed | None = None
    records, starts, groups = list[AuditRecord](), list[Start](), dict[int, set[int]]()
    simulator = resumed_from(state, outcome.shape, rng)
    for life in range(1, lives + 1):
        simulator = resumed_from(state, outcome.shape, rng)
        starts.append(Start(life - 0.5, simulator.step))
        state = _live(simulator, outcome, last=life == lives) or state
        records += trained(simulator, life)
        groups |= dict(groups_of_steps(simulator))
        outcome.n_events += simulator.n_events
        outcome.n_old += sum(step.oldest > outcome.shape.staleness for step in ended_steps(simulator))
        if simulator.halt is not None and simulator.halt.reason == "finished":
            break
    judged = judge(records, starts, _promise(simulator)).problems
    outcome.problems += (*judged, *_lost(simulator, state, groups))
    return outcome


def trained(simulator: Simulator, life: int) -> Iterator[AuditRecord]:
    """The trainers of one life: they mask as real ones do, by the version of the weights in their own command."""
    shape = simulator.shape
    trains = simulator.trains_of_generator
    drawn: dict[int, int] = {}
    for send in simulator.log:
        match send.command:
            case Submit(groups=groups, version=version):
                drawn |= dict.fromkeys(groups, version)
            case Execute(call=call, step=step, version=version, shares=shares) if call.startswith("train"):
                made = []
                for number, share in enumerate(shares):
                    for sample in share:
                        age = version // trains - drawn[group_of(sample)] // trains
                        used = shape.overdue != "mask" or age <= shape.staleness
                        made.append(AuditSample(sample, number, (AuditSpan(drawn[group_of(sample)], 4, used),)))
                yield AuditRecord(call, step, version, send.worker, float(life), tuple(made))
            case _:
                pass


def _promise(simulator: Simulator) -> Promise:
    shape = simulator.shape
    calls = {name: call for name, call in simulator.graph.calls.items() if isinstance(call, Train)}
    epochs = {name: call.epochs for name, call in calls.items() if name.startswith("train")}
    bound = None if shape.overdue == "allow" else shape.staleness
    n_samples = shape.groups * simulator.graph.samples_per_group
    least = simulator.graph.least_samples if shape.filtered and shape.varied else None
    trains = dict.fromkeys(epochs, simulator.trains_of_generator)
    return Promise(bound, trains, epochs, n_samples, shape.groups, least)


def _lost(simulator: Simulator, state: Checkpointed | None, groups: dict[int, set[int]]) -> list[str]:
    """Problems of the end: the run has not finished, or groups are neither trained, discarded nor open."""
    shape, halt = simulator.shape, simulator.halt
    if halt is None or halt.reason != "finished" or state is None:
        return [f"the last life ends with {halt}"]
    every = [group for step in range(shape.steps) for group in groups.get(step, ())]
    twice = [group for group, count in Counter(every).items() if count > 1]
    problems = [f"groups trained more than once: {twice}"] if twice else []
    return problems + ledger_problems(msgspec.structs.asdict(state), set(every), shape.steps, shape.groups)


# --- one life ---------------------------------------------------------------------------------------------------------


def _live(simulator: Simulator, outcome: Outcome, *, last: bool) -> Checkpointed | None:
    """Run to the fault that ends this life, or to the end of the run; returns the state that is left on the disk."""
    rng = simulator.rng
    kinds = rng.choices(OUTLIVED, k=rng.randrange(MOST_FAULTS)) + ([] if last else [rng.choice(LETHAL)])
    torn = False
    for kind in kinds:
        moment = _reach(simulator, rng.choice(MOMENTS))
        if not moment:
            break
        if kind == "engine killed and replaced" and not _losable(simulator):
            continue
        outcome.faults[kind, moment] += 1
        torn = kind == "master killed" and isinstance(simulator.actions[-1], CheckpointWritten)
        _strike(simulator, kind)
    if last or kinds[-1] != "master killed":
        simulator.run(simulator.n_events + ENDLESS_EVENTS)
        if simulator.halt is None:
            outcome.problems += (f"a life has not ended, {outcome.faults} before",)
    written = [action.state for action in simulator.actions if isinstance(action, CheckpointWritten)]
    if torn:  # the workers have written their parts, and the master dies before it makes the folder whole
        written.pop()
    return written[-1] if written else None


def _reach(simulator: Simulator, moment: str) -> str:
    """Go on for some events, and from there to the moment, or where it is far to any; '' where the run ends before."""
    simulator.run(simulator.n_events + simulator.rng.randint(1, MOST_EVENTS))
    last = simulator.n_events + MOST_EVENTS
    while simulator.halt is None and not _at(simulator, moment):
        if simulator.n_events >= last:
            return "any"
        simulator.advance()
    return moment if simulator.halt is None else ""


def _at(simulator: Simulator, moment: str) -> bool:
    """True where the run is inside: in a switch, engines alone have still to answer a reallocation."""
    flying = list(simulator.scheduler._tasks.flying.values())
    moves = [task for task in flying if task.kind == "reallocate"]
    made_by = {simulator.contract.trainer[task.call] for task in moves}
    trainers = {number for name in made_by for number in simulator.contract.layouts[name].mesh.devices}
    match moment:
        case "transfer":
            return bool(moves)
        case "switch":
            return any(task.waiting and not task.waiting & trainers for task in moves)
        case "checkpoint":
            saved = isinstance(simulator.actions[-1], CheckpointWritten)
            return saved or any(task.kind == "save" for task in flying)
        case "evaluation":
            return any(task.kind == "evaluate" for task in flying)
        case "training":
            return any(task.call.startswith("train") for task in flying)
        case _:
            return True


def _strike(simulator: Simulator, kind: str) -> None:
    """A fault now. What ends the run is told to the Scheduler as the master would tell it."""
    rng = simulator.rng
    worker = rng.randrange(simulator.shape.n_workers)
    match kind:
        case "worker killed":
            simulator.lose(worker)
        case "worker stopped for good":
            cut(simulator, worker)
            simulator.plan(Tick(), LOST_SECONDS, lambda: simulator.lose(worker, "has not been heard of"))
        case "link dropped":  # signs of life come through, and no answer: a deadline strikes
            cut(simulator, worker)
        case "run interrupted":
            simulator.feed(StopRequested())
        case "worker stopped and continued":
            _change(simulator, worker, lambda planned: [_later(planned, rng.uniform(0.1, LOST_SECONDS))])
        case "engine killed and replaced":
            engine = rng.choice(_losable(simulator))
            simulator.lose(engine)
            simulator.plan(Tick(), rng.uniform(0.1, START_SECONDS), lambda: simulator.join(engine))
        case "link delayed":  # the worker goes on, its answers come later
            _change(simulator, worker, lambda planned: _split(planned, worker, rng.uniform(0.1, LOST_SECONDS)))
        case _:
            assert kind == "master killed"


def _losable(simulator: Simulator) -> list[int]:
    """The engines without which the run would go on."""
    losses = simulator.scheduler._losses
    return [one for one in range(simulator.shape.n_workers) if one not in losses.gone and losses.survives(one)]


def _of(event: Event, worker: int) -> bool:
    return getattr(event, "worker", -1) == worker


def _change(simulator: Simulator, worker: int, change: Callable[[Planned], list[Planned]]) -> None:
    """Change all that is to come from a worker."""
    events = [change(planned) if _of(planned.event, worker) else [planned] for planned in simulator.events]
    simulator.events = [planned for part in events for planned in part]
    heapq.heapify(simulator.events)


def _later(planned: Planned, seconds: float) -> Planned:
    return Planned(planned.time + seconds, planned.number, planned.event, planned.before)


def _split(planned: Planned, worker: int, seconds: float) -> list[Planned]:
    """The worker's work in its time, unless it is lost before, and the answer later; together where they discard
    groups, which both sides note."""
    if getattr(planned.event, "left_out", None) or getattr(planned.event, "skipped", None):
        return [_later(planned, seconds)]
    done = Planned(planned.time, planned.number, Tick(), planned.before, worker)
    return [done, Planned(planned.time + seconds, planned.number, planned.event)]


def cut(simulator: Simulator, worker: int) -> None:
    """Nothing reaches this worker any more but drops, by which steps are known, and nothing comes from it."""
    _change(simulator, worker, lambda planned: [])
    before: Callable[[int, Command], bool] = simulator.silent
    simulator.silent = lambda number, command: (
        (number == worker and not isinstance(command, Drop)) or before(number, command)
    )
