"""The devices: whose turn it is, which weights lie where, whether the generate session is open.

A call on a trained role runs on the very version it needs: a copy that is older, or was given up after its last use,
gets a reallocation first.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from realgraph.planner.plan.plan import REALLOCATION, Turn, reallocation_node
from realgraph.runtime.commands.actions import Action, Checkpointed, Send
from realgraph.runtime.commands.tasks import Task
from realgraph.runtime.job.job import Job
from realgraph.runtime.scheduler.collection import Collection
from realgraph.runtime.scheduler.program import CallPlan, Program
from realgraph.runtime.scheduler.steps import OpenSteps
from realgraph.runtime.scheduler.transitions import SessionEvent, SessionState, session_after
from realgraph.runtime.scheduler.turns import LaneImage, NextTurn, Turns
from realgraph.runtime.wire.protocol import EndSession, Reallocate


class DevicesImage(Struct, frozen=True):
    """Meshes, weights and the generate session as plain data."""

    versions: dict[str, int]
    copies: dict[str, int]
    dropped: tuple[str, ...]
    session: int | None
    lanes: tuple[LaneImage, ...]


class Devices:
    """Meshes, weights and the generate session of a run."""

    def __init__(
        self, job: Job, program: Program, steps: OpenSteps, collection: Collection, state: Checkpointed
    ) -> None:
        self._staleness, self._program, self._steps, self._collection = job.plan.staleness, program, steps, collection
        self.versions = dict(state.versions)  # role -> completed train calls
        copies = [name for name, call in program.calls.items() if call.trainer_workers]
        # call -> version of its own copy; one that a new plan brings is loaded as it was saved
        self.copies = {name: state.copies.get(name, self.versions.get(program.calls[name].role, 0)) for name in copies}
        self.dropped = {name for name in copies if program.calls[name].dropped}  # whose copies are not on the devices
        orders = job.plan.orders
        named = {reallocation_node(name): name for name in copies if self._keeps_turn(name, orders)}
        planned = {turn.call for order in orders.values() for turn in order}
        self._moves = {turn: name for turn, name in named.items() if turn in planned}
        self.turns = Turns({d: self._followed(order) for d, order in orders.items()}, state.step, program.generate)
        self.session: int | None = None  # the step whose generate session is open
        self._session_state = SessionState.CLOSED
        offsets = [turn.offset for order in job.plan.orders.values() for turn in order]
        self._ahead = max(1, max(offsets, default=0) - min(offsets, default=0))

    def _keeps_turn(self, name: str, orders: Mapping[int, Sequence[Turn]]) -> bool:
        """True where the reallocation to `name` has its turn as planned.

        That to a stream has none; weights that are given up after use come just before it, not before other calls.
        """
        call = self._program.calls[name]
        if call.name == self._program.generate and self._staleness:
            return False
        return not call.dropped or all(_comes_next(name, orders.get(device, ())) for device in call.workers)

    def _followed(self, order: Sequence[Turn]) -> tuple[Turn, ...]:
        """Without the turns of reallocations that keep to none: an open session gets new weights as soon as it can."""
        return tuple(turn for turn in order if turn.call in self._program.calls or turn.call in self._moves)

    @property
    def image(self) -> DevicesImage:
        """All that they have."""
        copies, dropped = dict(self.copies), tuple(sorted(self.dropped))
        return DevicesImage(dict(self.versions), copies, dropped, self.session, self.turns.image)

    def restore(self, image: DevicesImage) -> None:
        """Go on from an image."""
        self.versions, self.copies, self.dropped = dict(image.versions), dict(image.copies), set(image.dropped)
        self.turns.restore(image.lanes)
        if image.session is not None:
            self._move_session(SessionEvent.TURN, image.session)

    def check(self) -> None:
        """Assert what is always true."""
        assert (self._session_state is SessionState.OPEN) == (self.session is not None)
        for name, version in self.copies.items():
            assert version <= self.versions[self._program.calls[name].role]
        assert all(self._program.calls[name].dropped for name in self.dropped)
        assert self.session is None or self._program.generate not in self.dropped

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def generator_weights(self) -> int:
        """The version of the weights that generate; 0 where nothing does."""
        call = self._program.calls.get(self._program.generate)
        return self.copies.get(call.name, self.versions.get(call.role, 0)) if call else 0

    @property
    def admission_version(self) -> int:
        """The version that admission counts: train steps behind the weights that generate.

        Frozen ones are as old as the step.
        """
        per_step = self._program.trains_of_generator
        return self.generator_weights // per_step if per_step else max(self._steps.completed, self.session or 0)

    def behind(self, call: str) -> bool:
        """True where `call` runs on a copy that is older than the trained weights, or was given up."""
        if call in self.dropped:
            return True
        return call in self.copies and self.copies[call] < self.versions[self._program.calls[call].role]

    def reallocate(self, name: str, now: float) -> list[Action] | None:
        """Bring the copy of `name` up to date; None where a mesh is not free. An open session of `name` goes on."""
        call = self._program.calls[name]
        lanes = self.turns.of(name, call.trainer)
        if not self.turns.idle(lanes):
            return None
        if self.session is not None and not self._staleness and name != self._program.generate:
            held = {id(lane) for lane in self.turns.of(self._program.generate)}
            if any(id(lane) in held for lane in lanes):
                return None
        workers = sorted({*call.workers, *call.trainer_workers})
        task = self._steps.tasks.open("reallocate", name, self._collection.step, self._collection.tally)
        command = Reallocate(task.number, call.role, name, self.versions[call.role], call.trainer_workers)
        self.turns.hold(lanes, task.number)
        self._steps.fly(task, workers, now, call.predicted_seconds)
        return [Send(worker, command) for worker in workers]

    # --- what has ended -----------------------------------------------------------------------------------------------

    def ended(self, call: CallPlan, task: Task) -> None:
        """A mesh-holding call of a step has ended on all its workers."""
        if call.kind == "train":
            self.versions[call.role] += 1
        self.dropped.update(call.dropped)
        self.turns.release(task.number)
        self.turns.leave(task.call, task.step)

    def reallocated(self, task: Task) -> None:
        """The copy is what is trained: nothing was trained meanwhile, the reallocation held that mesh too."""
        self.turns.release(task.number)
        self.copies[task.call] = self.versions[self._program.calls[task.call].role]
        self.dropped.discard(task.call)

    def _move_session(self, event: SessionEvent, step: int | None) -> None:
        """Take `event` in the session's life; `step`: the one it is open for from now on, None where it is closed."""
        self._session_state = session_after(self._session_state, event)
        self.session = step
        if self._staleness:
            self.turns.streaming = None if step is None else NextTurn(self._program.generate, step)

    def close_session(self, step: int) -> list[Action]:
        """The batch of `step` is there: a session opened for it or an earlier one has had its turn."""
        if self.session is None or self.session > step:
            return []
        self.turns.leave(self._program.generate, self.session)
        self._move_session(SessionEvent.BATCH_MADE, None)
        return self.release_generator()

    def release_generator(self) -> list[Action]:
        """Give the generator's memory to other calls, where no session is open and such may come."""
        call = self._program.calls[self._program.generate]
        if self.session is not None or not call.gives_way:
            return []
        self.dropped.update(call.dropped)
        return [Send(worker, EndSession(call.name)) for worker in call.workers]

    def abandon_session(self, target: int) -> bool:
        """Close the session if the run now ends before its step; whether it did."""
        if self.session is None or self.session < target:
            return False
        self._move_session(SessionEvent.RUN_ENDS_BEFORE, None)
        return True

    # --- turns --------------------------------------------------------------------------------------------------------

    def _may_run(self, head: NextTurn) -> bool:
        """True where all that `head` needs is there, its copy of the weights left aside."""
        call = self._program.calls[head.call]
        if call.kind != "generate":
            return self._steps.may_run(call, head.step, self.versions)
        if self.session is not None:
            return False
        if not self._program.trains_of_generator:
            return head.step <= self._steps.completed + self._ahead + self._staleness
        return self._trained_for(call, head.step)

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
        generate, next_batch = self._program.generate, self._collection.step
        made = [head for head in heads if head.call == generate and head.step < next_batch and self.session is None]
        for head in made:
            self.turns.leave(head.call, head.step)
        return bool(made)

    def take_turns(self, barrier: int, target: int, now: float) -> list[Action] | None:
        """Start reallocations first, then the calls that are next on all their devices; None where nothing moved.

        What waits for a reallocation has its meshes to itself from now on, so that other calls never starve it.
        """
        heads = self.turns.next(barrier, target)
        if self._skip_made(heads):
            return []
        actions = self._take_moves(heads, now)
        if actions is not None:
            return actions
        heads = [head for head in heads if head.call not in self._moves and self._may_run(head)]
        wanted = [head.call for head in heads if self.behind(head.call)]
        if self.session is not None and self.behind(self._program.generate):
            wanted.insert(0, self._program.generate)
        actions, moved = [], False
        reserved: set[int] = set()
        for name in wanted:
            commands = self.reallocate(name, now)
            if commands is None:
                reserved.update(id(lane) for lane in self.turns.of(name, self._program.calls[name].trainer))
            else:
                actions += commands
                moved = True
        for head in heads:
            lanes = self.turns.of(head.call)
            if self.behind(head.call) or not self.turns.idle(lanes) or any(id(lane) in reserved for lane in lanes):
                continue
            moved = True
            if head.call == self._program.generate:
                self._move_session(SessionEvent.TURN, head.step)
            else:
                task, commands = self._steps.start(head.call, head.step, self.versions, now)
                self.turns.hold(lanes, task.number)
                actions += commands
        return actions if moved else None


def _comes_next(name: str, order: Sequence[Turn]) -> bool:
    """True where in a device's round `name` follows the reallocation to it, but for other reallocations."""
    turns = [turn.call for turn in order]
    if reallocation_node(name) not in turns:
        return False
    first = turns.index(reallocation_node(name))
    later = [call for call in (*turns[first:], *turns[:first]) if not call.startswith(REALLOCATION)]
    return later[0] == name
