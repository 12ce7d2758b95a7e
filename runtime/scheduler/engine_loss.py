"""Goes on without an engine that is lost, and with one that takes its place: its groups go on with those engines that
keep their tokens. Those that nobody keeps are made again, from their prompts.

No sample is lost or trained twice: a group has one number and one place in the ledger. What a step has begun to train
is with its trainers already.
"""

from collections.abc import Iterable, Mapping, Sequence

from realgraph.runtime.commands import failures
from realgraph.runtime.commands.actions import Action, EngineJoined, EngineLost, EngineReplaced, Event, Send
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.engine_loss import expendable_workers, shares_tokens
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.boundary_runner import BoundaryRunner
from realgraph.runtime.scheduler.collection import Collection
from realgraph.runtime.scheduler.devices import Devices
from realgraph.runtime.scheduler.ledger import Group, Ledger
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.scheduler.transitions import GroupState
from realgraph.runtime.wire.protocol import NOBODY, Failed, Forget, Keep

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
        self._expendable, self._min_engines = expendable_workers(job.graph, job.plan), job.rollout.min_engines
        self._ledger, self._shares = ledger, shares_tokens(job.graph, job.plan)
        layouts = [allocation.layout for allocation in job.plan.allocations.values()]
        self._workers = sorted({device for layout in layouts for device in layout.mesh.devices})
        self._graph = job.graph
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
        """True of what a worker that is gone has still said, and of further news of its end."""
        return not isinstance(event, EngineJoined) and getattr(event, "worker", -1) in self.gone

    def reaching(self, actions: Sequence[Action]) -> list[Action]:
        """The actions without commands to workers that are gone."""
        return [one for one in actions if not isinstance(one, Send) or one.worker not in self.gone]

    @property
    def n_engines(self) -> int:
        """The engines that there are; 0 where none can be lost."""
        return len(self._devices.engines.heads) if self._expendable else 0

    def join(self, event: EngineJoined) -> list[Action]:
        """A new process stands for a worker that is gone. It gets groups once it has the weights of the others."""
        worker = event.worker
        self.gone.remove(worker)
        self._devices.engines.join(worker, event.process, FIRST_VERSION, self._devices.generator_weights)
        self._collection.join(worker)
        n_left, n_all = len(self._devices.engines.heads), len(self._expendable)
        text = f"a new process has taken the place of worker {worker}: the run has {n_left} of {n_all} engines"
        return [EngineReplaced(worker, text), *(self._keep(NOBODY) if self._shares else ())]

    def survives(self, worker: int) -> bool:
        """True where the run can go on without `worker`."""
        enough = len(self._devices.engines.heads) > self._min_engines
        return worker in self._expendable and enough and self._steps.can_lose(worker)

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
        """Go on without `worker`; returns the tasks, too, that waited for it alone, and so have ended."""
        self.gone.add(worker)
        tasks, ended = self._steps.tasks, list[Task]()
        for task in tasks.of(worker):
            task.waiting.discard(worker)
            if task.kind == "stream":
                tasks.close(task)
                continue
            self._runner.spoiled |= task.kind == "evaluate"
            ended += [] if task.waiting else [task]
        self._devices.engines.lose(worker)
        takers = set(self._devices.engines.heads) - self._devices.engines.resting
        versions = {engine: self._devices.generator_version(engine) for engine in takers}
        moved, n_again = self._collection.lose(worker, self._steps.put_back(worker), versions, now)
        n_left, n_all = len(self._devices.engines.heads), len(self._expendable)
        n_moved = sum(len(groups) for groups in moved.values())
        text = f"worker {worker} was lost: {reason}. The run goes on with {n_left} of {n_all} engines: {n_moved} of "
        text += f"its prompt groups go on there with their tokens, {n_again} are made again"
        return [EngineLost(worker, text), *self.go_on(moved, now), *self._forget(worker), *self._keep(worker)], ended

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
