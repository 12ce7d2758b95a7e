"""Goes on without an engine that is lost, and with one that takes its place: its groups go on with those engines that
keep their tokens. Those that nobody keeps are made again, from their prompts.

No sample is lost or trained twice: a group has one number and one place in the ledger. The workers of a step have what
it reads of engines before it begins.
"""

from collections.abc import Iterable, Mapping, Sequence

from realgraph.runtime.commands import failures
from realgraph.runtime.commands.actions import Action, EngineJoined, EngineLost, EngineReplaced, Event, Send
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.engine_loss import expendable_engines, shares_tokens
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.boundary_runner import BoundaryRunner
from realgraph.runtime.scheduler.collection import Collection
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.groups.ledger import Group, Ledger
from realgraph.runtime.scheduler.groups.transitions import GroupState
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.protocol import NOBODY, Done, Failed, Forget, Keep

FIRST_VERSION = 0  # of the weights that an engine begins with


class EngineLosses:
    """The engines that a run has lost so far. `gone`: their workers, of which nothing is heard or told any more."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        collection: Collection,
        steps: OpenSteps,
        devices: Devices,
        runner: BoundaryRunner,
    ) -> None:
        self._collection, self._steps, self._devices, self._runner = collection, steps, devices, runner
        engines = expendable_engines(job.graph, job.plan)
        self._engine_of = {worker: engine for engine in engines for worker in engine}
        self._n_all, self._min_engines = len(engines), job.rollout.min_engines
        self._ledger, self._shares = ledger, shares_tokens(job.graph, job.plan)
        layouts = [allocation.layout for allocation in job.plan.allocations.values()]
        self._workers = sorted({device for layout in layouts for device in layout.mesh.devices})
        self._graph, self._all_heads = job.graph, frozenset(devices.engines.heads)
        self.gone: set[int] = set()

    @property
    def n_again(self) -> int:
        """Groups that are to be admitted though their sessions have had their turns: those that were lost, or left out
        of a batch that was put back."""
        if not (self.gone or self._devices.engines.joined):
            return 0
        step, generate = self._collection.step, self._graph.generates[0]
        left_out = self._ledger.missing(step) if self._devices.turns.had(generate, step) else 0
        return max(self._ledger.n_again, left_out)

    def left(self, workers: Iterable[int]) -> list[int]:
        """Those of the workers that are not gone."""
        return [worker for worker in workers if worker not in self.gone]

    def ignores(self, event: Event) -> bool:
        """True of what a worker that is gone has still said, and of further news of its end; and of answers that nobody
        waits for, also where it is that the inputs of a step that was put back could not be gathered."""
        match event:
            case Done(task=task) | Failed(task=task) if task in self._steps.tasks.given_up:
                return True
            case _:
                return getattr(event, "worker", -1) in self.gone

    def reaching(self, actions: Sequence[Action]) -> list[Action]:
        """The actions without commands to workers that are gone."""
        return [one for one in actions if not isinstance(one, Send) or one.worker not in self.gone]

    @property
    def n_engines(self) -> int:
        """The engines that there are; 0 where none can be lost."""
        return len({self._engine_of[head] for head in self._devices.engines.heads}) if self._engine_of else 0

    def join(self, event: EngineJoined) -> list[Action]:
        """New processes stand for an engine that is gone. It gets groups once it has the weights of the others."""
        self.gone.difference_update(event.workers)
        for head in self._heads(event.workers):
            self._devices.engines.join(head, event.process, FIRST_VERSION, self._devices.generator_weights)
            self._collection.join(head)
        text = f"a new process has taken the place of {failures.workers_text(event.workers)}"
        if len(event.workers) > 1:
            text = f"new processes have taken the place of {failures.workers_text(event.workers)}"
        text += f": the run has {self.n_engines} of {self._n_all} engines"
        return [EngineReplaced(event.workers, text), *(self._keep(NOBODY) if self._shares else ())]

    def _heads(self, engine: Iterable[int]) -> list[int]:
        """Those of an engine's workers that take its groups."""
        return [worker for worker in engine if worker in self._all_heads]

    def survives(self, worker: int) -> bool:
        """True where the run can go on without `worker`: not where it has samples that an evaluation scores."""
        engine = self._engine_of.get(worker, ())
        enough = self.n_engines > self._min_engines and not self._runner.holds_samples
        return bool(engine) and enough and all(self._steps.can_lose(one) for one in engine)

    def fatal(self, worker: int, reason: str) -> Failed:
        """The failure of a run that can't go on without `worker`."""
        all_tasks = self._steps.tasks
        tasks = all_tasks.of(worker)
        task = next((task for task in tasks if task.kind != "stream"), tasks[0] if tasks else None)
        if task is not None:
            doing, call = f"while it ran {failures.doing_text(task)}", task.call
        elif worker in all_tasks.watches:
            call = self._collection.call_of(worker)
            doing = f"while it {'ran ' + call if call else 'loaded data'} for step {self._steps.completed}"
        else:
            doing, call = "between two calls", ""
        return failures.lost(worker, reason, doing, call)

    def lose(self, worker: int, reason: str, now: float) -> tuple[list[Action], list[Task]]:
        """Go on without `worker` and the others of its engine; returns the tasks, too, that waited for them alone, and
        so have ended."""
        engine = self._engine_of[worker]
        heads = self._heads(engine)
        self.gone.update(engine)
        self._runner.spoiled |= self._runner.draws_samples
        ended = [task for one in engine for task in self._without(one)]
        for head in heads:
            self._devices.engines.lose(head)
        takers = set(self._devices.engines.heads) - self._devices.engines.resting
        versions = {taker: self._devices.generator_version(taker) for taker in takers}
        moved, n_again = dict[int, list[Group]](), 0
        for head in heads:
            kept, n_lost = self._collection.lose(head, self._steps.put_back(head), versions, now)
            n_again += n_lost
            for taker, groups in kept.items():
                moved.setdefault(taker, []).extend(groups)
        n_moved = sum(len(groups) for groups in moved.values())
        text = f"worker {worker} was lost: {reason}. The run goes on with {self.n_engines} of {self._n_all} engines: "
        text += f"{n_moved} of its prompt groups go on there with their tokens, {n_again} are made again"
        news = [action for one in engine for action in self._forget(one)]
        news += [action for head in heads for action in self._keep(head)]
        return [EngineLost(engine, text), *self.go_on(moved, now), *news], ended

    def _without(self, worker: int) -> list[Task]:
        """No task waits for a lost worker any more; returns those that waited for it alone, and so have ended."""
        tasks, ended = self._steps.tasks, list[Task]()
        for task in tasks.of(worker):
            task.waiting.discard(worker)
            if task.kind == "stream":
                tasks.close(task)
                continue
            self._runner.spoiled |= task.kind == "evaluate"
            ended += [] if task.waiting else [task]
        return ended

    def go_on(self, moved: Mapping[int, Sequence[Group]], now: float) -> list[Action]:
        """Have workers go on with groups whose tokens they keep, under whatever weights they have."""
        others = self._devices.generator_weights
        versions = {worker: self._devices.engines.version(worker, others) for worker in moved}
        return [self._collection.submit(one, groups, versions[one], now) for one, groups in moved.items()]

    def _forget(self, worker: int) -> list[Action]:
        """Nothing more is awaited from a lost worker, nor needed of the tokens that it has told others."""
        return [Send(other, Forget(worker)) for other in self.left(self._workers)]

    def _keep(self, worker: int) -> list[Action]:
        """Others keep the tokens of groups that a lost worker has kept, or nobody."""
        owners: dict[int, list[Group]] = {}
        for group in self._ledger.live.values():
            if group.keeper == worker and group.owner not in self.gone and group.state is not GroupState.BATCHED:
                owners.setdefault(group.owner, []).append(group)
        return [
            Send(owner, Keep(tuple([group.id for group in groups]), self._collection.keepers(groups)))
            for owner, groups in owners.items()
        ]
