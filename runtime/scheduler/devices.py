"""The devices: whose turn it is, which weights lie where, which generate sessions are open.

A call on a trained role runs on the very version it needs: a copy that is older, or was given up after its last use,
gets a reallocation first.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from realgraph.planner.plan.plan import Turn, reallocation_node
from realgraph.runtime.commands.actions import Action, Checkpointed, Send
from realgraph.runtime.commands.loads import Admission
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.collection import Collection
from realgraph.runtime.scheduler.groups.transitions import SessionEvent, SessionState, session_after
from realgraph.runtime.scheduler.meshes.turns import LaneImage, NextTurn, Turns, comes_next
from realgraph.runtime.scheduler.meshes.weights import EngineWeights, EngineWeightsImage, WeightMove
from realgraph.runtime.scheduler.program import CallPlan, Program
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.wire.protocol import EndSession, Reallocate


class DevicesImage(Struct, frozen=True):
    """Meshes, weights and the generate session as plain data."""

    versions: dict[str, int]
    copies: dict[str, int]
    engines: EngineWeightsImage
    dropped: tuple[str, ...]
    sessions: dict[str, int]
    lanes: tuple[LaneImage, ...]


class Devices:
    """Meshes, weights and the generate sessions of a run. Sessions stream, so that other calls run beside them, where
    samples may be stale or several calls generate: then each session waits for others."""

    def __init__(
        self, job: Job, program: Program, steps: OpenSteps, collection: Collection, state: Checkpointed
    ) -> None:
        self._staleness, self._program, self._steps, self._collection = job.plan.staleness, program, steps, collection
        self._streams = self._staleness > 0 or bool(program.later)
        # new weights wait until no sample is under way, none begins meanwhile
        self._drains = job.rollout.interrupt == "wait" and job.plan.staleness > 0 and bool(program.paced)
        self.versions = dict(state.versions)  # role -> completed train calls
        copies = [name for name, call in program.calls.items() if call.trainer_workers]
        # call -> version of its own copy; one that a new plan brings is loaded as it was saved
        self.copies = {name: state.copies.get(name, self.versions.get(program.calls[name].role, 0)) for name in copies}
        self.engines = EngineWeights(
            program.generate, program.calls[program.generate].ranks if program.generate else ()
        )
        self.dropped = {name for name in copies if program.calls[name].dropped}  # whose copies are not on the devices
        orders = job.plan.orders
        named = {reallocation_node(name): name for name in copies if self._keeps_turn(name, orders)}
        planned = {turn.call for order in orders.values() for turn in order}
        self._moves = {turn: name for turn, name in named.items() if turn in planned}
        self.turns = Turns({d: self._followed(order) for d, order in orders.items()}, state.step, program.generates)
        self.sessions: dict[str, int] = {}  # generate call whose session is open -> the step that it is open for
        self._states = dict.fromkeys(program.generates, SessionState.CLOSED)
        offsets = [turn.offset for order in job.plan.orders.values() for turn in order]
        self._ahead = max(1, max(offsets, default=0) - min(offsets, default=0))

    def _keeps_turn(self, name: str, orders: Mapping[int, Sequence[Turn]]) -> bool:
        """True where the reallocation to `name` has its turn as planned.

        That to a stream has none; weights that are given up after use come just before it, not before other calls.
        """
        call = self._program.calls[name]
        if call.kind == "generate" and self._streams:
            return False
        return not call.dropped or all(comes_next(name, orders.get(device, ())) for device in call.workers)

    def _followed(self, order: Sequence[Turn]) -> tuple[Turn, ...]:
        """Without the turns of reallocations that keep to none: an open session gets new weights as soon as it can."""
        return tuple(turn for turn in order if turn.call in self._program.calls or turn.call in self._moves)

    @property
    def image(self) -> DevicesImage:
        """All that they have."""
        copies, dropped, lanes = dict(self.copies), tuple(sorted(self.dropped)), self.turns.image
        return DevicesImage(dict(self.versions), copies, self.engines.image, dropped, dict(self.sessions), lanes)

    def restore(self, image: DevicesImage) -> None:
        """Go on from an image."""
        self.versions, self.copies, self.dropped = dict(image.versions), dict(image.copies), set(image.dropped)
        self.engines.restore(image.engines)
        self.turns.restore(image.lanes)
        for name, step in image.sessions.items():
            self._move_session(name, SessionEvent.TURN, step)

    def check(self) -> None:
        """Assert what is always true."""
        assert {name for name, state in self._states.items() if state is SessionState.OPEN} == set(self.sessions)
        assert set(self._collection.sessions) == set(self.sessions) - {self._program.generate}
        for name, version in self.copies.items():
            assert version <= self.versions[self._program.calls[name].role]
        assert all(version < self.generator_weights for version in self.engines.late.values())
        assert all(self._program.calls[name].dropped for name in self.dropped)
        assert not self.sessions.keys() & self.dropped

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> int | None:
        """The step whose session is open that makes the samples of groups; None where it is closed."""
        return self.sessions.get(self._program.generate)

    @property
    def generator_weights(self) -> int:
        """The version of the weights that make the samples of groups; 0 where nothing does."""
        return self.weights_of(self._program.generate)

    def weights_of(self, generate: str) -> int:
        """The version of the weights of a generate call; 0 where they are frozen, or there is no such call."""
        call = self._program.calls.get(generate)
        return self.copies.get(call.name, self.versions.get(call.role, 0)) if call else 0

    def admissions(self) -> list[Admission]:
        """The weights that groups may be admitted at, oldest first: those that all engines have, then newer ones that
        some have switched to."""
        weights = self.generator_weights
        resting, switched = self.engines.resting, self.engines.switched
        found = [Admission(self._admission_version(weights), weights, resting=resting)]
        newer = max(switched.values(), default=weights)
        if newer == weights:
            return found
        return [*found, Admission(self._admission_version(newer), newer, switched, resting)]

    def _admission_version(self, weights: int) -> int:
        """The version that admission counts where the samples of groups are made by `weights`: train steps behind the
        oldest weights that generate what is trained on. Frozen ones are as old as the step."""
        paced, generate = self._program.paced, self._program.generate
        versions = [(name, weights if name == generate else self.weights_of(name)) for name in paced]
        steps = [version // self._program.trains_of(name) for name, version in versions]
        return min(steps, default=max(self._steps.completed, self.session or 0))

    def generator_version(self, worker: int) -> int:
        """The version that `worker` makes the samples of groups with, in train steps; 0 where they are frozen."""
        per_step = self._program.trains_of(self._program.generate)
        return self.engines.version(worker, self.generator_weights) // per_step if per_step else 0

    @property
    def whole_step(self) -> int | None:
        """The completed steps of the weights of all engines that make the samples of groups; None where they have
        different ones, new ones are on their way, or a step is half trained."""
        per_step = self._program.trains_of(self._program.generate)
        if not self.engines.settled or not per_step or self.generator_weights % per_step:
            return None
        return self.generator_weights // per_step

    def may_load(self, engine: int, version: int) -> bool:
        """True where an engine has no groups, other ones have weights of `version` or newer ones, and none are on their
        way."""
        moving = any(move.call == self._program.generate for move in self.engines.moving.values())
        return not moving and not self._collection.n_open(engine) and self.generator_weights >= version

    def behind(self, call: str) -> bool:
        """True where `call` runs on a copy that is older than the trained weights, or was given up; engines that keep
        their weights left aside."""
        if call in self.dropped:
            return True
        return call in self.copies and bool(self._receivers(call))

    def _opens_beside(self, name: str) -> bool:
        """True where the session of `name` may open while new weights come: engines have older ones meanwhile."""
        return self._staleness > 0 and name == self._program.generate and name not in self.dropped

    def _newest(self, name: str) -> int:
        return self.versions[self._program.calls[name].role]

    def _receivers(self, name: str) -> tuple[int, ...]:
        return self.engines.receivers(name, self._program.calls[name].workers, self.copies[name], self._newest(name))

    def draining(self, barrier: int, target: int) -> list[str]:
        """The generate calls of which no sample may begin before new weights have come that wait for those under
        way."""
        if not self._drains:
            return []
        heads = [head for head in self.turns.next(barrier, target) if head.call in self._program.batched]
        ahead = {name for head in heads for name in self._changed(head.call) if self._steps.may_run(*self._at(head))}
        return [name for name in self._program.generates if name in ahead or self.behind(name)]

    @property
    def drained(self) -> bool:
        """True where new weights of a generate call wait for samples under way, and there are none."""
        trained = [name for name in self._program.generates if self._program.trains_of(name)]
        return self._drains and not all(self._collection.loads[name].n_making for name in trained)

    def _changed(self, name: str) -> list[str]:
        """The generate calls whose very weights `name` changes: its own copy, or those that it trains in place."""
        call, generates = self._program.calls[name], self._program.generates
        if call.kind != "train":
            return [name] if name in generates else []
        return [one for one in generates if self._program.calls[one].role == call.role and one not in self.copies]

    def _busy(self, name: str) -> bool:
        """True where `name`, which changes the weights that generate, waits until no sample is under way."""
        return self._drains and any(self._collection.loads[changed].n_making for changed in self._changed(name))

    def reallocate(self, name: str, now: float) -> list[Action] | None:
        """Bring the copy of `name` up to date; None where a mesh is not free, or samples are under way that new weights
        wait for. An open session of `name` goes on."""
        if self._busy(name):
            return None
        call = self._program.calls[name]
        lanes = self.turns.of(name, call.trainer)
        if not self.turns.idle(lanes):
            return None
        if self.session is not None and not self._streams and name != self._program.generate:
            own = {id(lane) for lane in self.turns.of(self._program.generate)}
            if any(id(lane) in own for lane in lanes):
                return None
        receivers = call.workers if name in self.dropped else self._receivers(name)
        move = WeightMove(self.versions[call.role], name, receivers)
        workers = sorted({*move.receivers, *call.trainer_workers})
        task = self._steps.tasks.open("reallocate", name, self._collection.step, self._collection.tally)
        joined = {worker: n for worker, n in self.engines.joined.items() if worker in move.receivers}
        command = Reallocate(task.number, call.role, name, move.version, call.trainer_workers, move.receivers, joined)
        self.engines.moving[task.number] = move
        self.turns.hold(lanes, task.number)
        self._steps.fly(task, workers, now, call.predicted_seconds)
        return [Send(worker, command) for worker in workers]

    # --- what has ended -----------------------------------------------------------------------------------------------

    def ended(self, call: CallPlan, task: Task) -> None:
        """A mesh-holding call of a step has ended on all its workers."""
        if call.kind == "train":
            self.versions[call.role] += 1
            self._publish_versions()
        self.dropped.update(call.dropped)
        self.turns.release(task.number)
        self.turns.leave(task.call, task.step)

    def answered(self, task: Task, worker: int) -> bool:
        """A worker has done its part of a reallocation, others have not. True where something may start now.

        The engines of a stream do not wait for each other: one that has its weights gets groups by them, and what is
        trained goes on as soon as its own workers have done theirs.
        """
        call = self._program.calls[task.call]
        if call.name != self._program.generate or not self._staleness:
            return False
        if worker in self._program.owner_workers:
            self.engines.switched[worker] = self.engines.moving[task.number].version
        elif task.waiting.isdisjoint(call.trainer_workers):
            own = {id(lane) for lane in self.turns.of(call.name)}
            for lane in self.turns.of(call.trainer):
                if id(lane) not in own and lane.task == task.number:
                    lane.task = None
        return True

    def reallocated(self, task: Task) -> None:
        """The copy is what was trained when the reallocation began."""
        self.turns.release(task.number)
        self.copies[task.call] = self.engines.ended(task.number, self.copies[task.call])
        self.dropped.discard(task.call)
        self._publish_versions()

    def _publish_versions(self) -> None:
        """Later generate calls are asked for samples of the weights that they have now."""
        for name in self._collection.sessions:
            self._collection.sessions[name] = self.weights_of(name)

    def _move_session(self, name: str, event: SessionEvent, step: int | None) -> None:
        """Take `event` in a session's life; `step`: the one it is open for from now on, None where it is closed."""
        self._states[name] = session_after(self._states[name], event)
        if step is None:
            del self.sessions[name]
            self._collection.sessions.pop(name, None)
        else:
            self.sessions[name] = step
        self.turns.streaming = {NextTurn(*session) for session in self.sessions.items()} if self._streams else set()

    def close_session(self, step: int) -> list[Action]:
        """The batch of `step` is there: sessions opened for it or an earlier one have had their turns."""
        ended = [name for name, opened in self.sessions.items() if opened <= step]
        for name in ended:
            self.turns.leave(name, self.sessions[name])
            self._move_session(name, SessionEvent.BATCH_MADE, None)
        return self.release_generator() if self._program.generate in ended else []

    def release_generator(self) -> list[Action]:
        """Give the generator's memory to other calls, where no session is open and such may come."""
        call = self._program.calls[self._program.generate]
        if self.session is not None or not call.gives_way:
            return []
        self.dropped.update(call.dropped)
        return [Send(worker, EndSession(call.name)) for worker in call.workers]

    def abandon_session(self, target: int) -> bool:
        """Close sessions if the run now ends before their steps; whether that of the group's samples was one."""
        ended = [name for name, step in self.sessions.items() if step >= target]
        for name in ended:
            self._move_session(name, SessionEvent.RUN_ENDS_BEFORE, None)
        return self._program.generate in ended

    def stands_still(self, worker: int) -> bool:
        """True where the groups of `worker` wait with their tokens: their session is closed, so that its mesh runs
        other calls (where nothing runs, new weights wait for them: `interrupt: wait`), or the worker has another
        command, whose deadline is its own."""
        if not self._program.generate:
            return False
        tasks = self._steps.tasks
        open_there = self.sessions.keys() & self._collection.making(worker)
        closed = not open_there and bool(tasks.flying)
        return closed or any(task.kind != "stream" for task in tasks.of(worker))

    # --- turns --------------------------------------------------------------------------------------------------------

    def _may_run(self, head: NextTurn) -> bool:
        """True where all that `head` needs is there, its copy of the weights left aside."""
        call = self._program.calls[head.call]
        if call.kind != "generate":
            return not self._busy(head.call) and self._steps.may_run(*self._at(head))
        if head.call in self.sessions:
            return False
        if not self._program.trains_of(head.call):
            return head.step <= self._steps.completed + self._ahead + self._staleness
        return self._trained_for(call, head.step)

    def _at(self, head: NextTurn) -> tuple[CallPlan, int, Mapping[str, int]]:
        return self._program.calls[head.call], head.step, self.versions

    def _trained_for(self, call: CallPlan, step: int) -> bool:
        """True where the trained role of `call` is at a version that `step` may run on."""
        staleness = self._staleness if call.kind == "generate" else 0
        return self.versions[call.role] // self._program.trains[call.role] >= step - staleness

    def _take_moves(self, heads: list[NextTurn], now: float) -> list[Action] | None:
        """Start reallocations whose turn it is, pass those whose copy is what is trained already; None: neither."""
        moved = False
        actions: list[Action] = []
        for head in heads:
            name = self._moves.get(head.call)
            if name is None or not self._trained_for(self._program.calls[name], head.step):
                continue
            if not self.behind(name):
                self.turns.leave(head.call, head.step)
                moved = True
                continue
            commands = self.reallocate(name, now)
            if commands is not None:
                actions += commands
                moved = True
        return actions if moved else None

    def _skip_made(self, heads: list[NextTurn]) -> bool:
        """Pass the generate turns of steps whose batches are there already."""
        generates, next_batch = self._program.generates, self._collection.step
        idle = [head for head in heads if head.call in generates and head.call not in self.sessions]
        made = [head for head in idle if head.step < next_batch]
        for head in made:
            self.turns.leave(head.call, head.step)
        return bool(made)

    def take_turns(self, barrier: int, target: int, now: float) -> list[Action] | None:
        """Start reallocations first, then the calls that are next on all their devices; None where nothing moved.

        What waits for a reallocation has its meshes to itself from now on, so that other calls never starve it. While
        one is under way, training goes on, and a stream's session opens for engines that have its weights already.
        """
        heads = self.turns.next(barrier, target)
        if self._skip_made(heads):
            return []
        self._collection.starves(self.turns.awaits_batch(self._program.trainer, heads, self._collection.step), now)
        actions = self._take_moves(heads, now)
        if actions is not None:
            return actions
        heads = [head for head in heads if head.call not in self._moves and self._may_run(head)]
        names = [*self.sessions, *([self._program.generate] if self.engines.newcomers else ())]
        names += [head.call for head in heads]
        wanted = [name for name in dict.fromkeys(names) if self.behind(name)]
        coming = {name for name in wanted if self.engines.brings(name, self._newest(name))}
        actions, moved = [], False
        reserved: set[int] = set()
        for name in wanted:
            commands = self.reallocate(name, now) if name not in coming else None
            if commands is not None:
                actions += commands
                moved = True
            elif name not in coming and not self._busy(name):
                reserved.update(id(lane) for lane in self.turns.of(name, self._program.calls[name].trainer))
        for head in heads:
            lanes = self.turns.of(head.call)
            waits = self.behind(head.call) or not self.turns.idle(lanes) or any(id(lane) in reserved for lane in lanes)
            if waits and not (head.call in coming and self._opens_beside(head.call)):
                continue
            moved = True
            if head.call in self._program.generates:
                self._move_session(head.call, SessionEvent.TURN, head.step)
                if head.call in self._program.later:
                    actions += self._collection.open_session(head.call, self.weights_of(head.call), now)
            else:
                task, commands = self._steps.start(head.call, head.step, self.versions, now)
                self.turns.hold(lanes, task.number)
                actions += commands
        return actions if moved else None
