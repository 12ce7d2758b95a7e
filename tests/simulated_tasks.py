"""Time in a simulation: the events that are to come, answers to tasks, and devices that tasks hold until then. Knows
neither the Scheduler nor what a task is about."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from realgraph.runtime.commands.actions import Event
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Sample
from tests.shapes import Shape


@dataclass(order=True)
class Planned:
    """An event that is to come."""

    time: float
    number: int
    event: Event = field(compare=False)
    before: Callable[[], None] | None = field(default=None, compare=False)  # what the worker did by then
    worker: int = field(default=-1, compare=False)  # which worker, where the event does not say


class SimulatedTasks:
    """Workers answer after random durations, which come from `rng`. Whoever advances time sets `now`."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape, self.rng = shape, rng
        self.now = 0.0
        self.events: list[Planned] = []
        self.n_planned = 0
        self.steady = False  # durations depend on what is done, not on the order of events
        self.holding: dict[int, int] = {}  # device -> task
        self.awaited: dict[int, set[int]] = {}  # task -> workers
        self.early: dict[int, set[int]] = {}  # task -> workers that are free as soon as all of them have answered

    def plan(self, event: Event, delay: float, before: Callable[[], None] | None = None) -> None:
        """`event` comes after `delay` seconds."""
        self.n_planned += 1
        heapq.heappush(self.events, Planned(self.now + delay, self.n_planned, event, before))

    def seconds(self, what: str) -> float:
        """The time that a worker takes."""
        rng = random.Random(f"{self.shape.seed} {what}") if self.steady else self.rng
        return rng.expovariate(1.0)

    def hold(self, device: int, task: int) -> None:
        """A mesh-holding task takes a device."""
        assert self.holding.get(device, task) == task, f"tasks {task} and {self.holding[device]} meet on {device}"
        self.holding[device] = task

    def answer(
        self,
        number: int,
        task: int,
        call: str,
        before: Callable[[], None] | None,
        metrics: dict[str, Mean] | None = None,
        left_out: dict[int, tuple[int, ...]] | None = None,
        step: int = 0,
        by_group: dict[int, dict[str, Mean]] | None = None,
        loaded: tuple[Sample, ...] = (),
    ) -> float:
        """`Done` after a random while, which is returned."""
        self.awaited.setdefault(task, set()).add(number)

        def ended() -> None:
            self.awaited[task].discard(number)
            if self.holding.get(number) == task:
                self.holding[number] = -task - 1  # free only when the whole mesh is
            if not self.early.get(task, set()) & self.awaited[task]:
                for device in [d for d in self.early.get(task, ()) if self.holding.get(d) == -task - 1]:
                    del self.holding[device]
            if not self.awaited[task]:
                for device in [d for d, t in self.holding.items() if t in (task, -task - 1)]:
                    del self.holding[device]
            if before is not None:
                before()

        state = {"coef": float(step + 1)} if call == "advantage" else {}
        told = metrics or {}, state, left_out or {}, by_group or {}
        done = Done(number, task, call, *told, self.now, self.now + 1, loaded=loaded)
        seconds = self.seconds(f"{call} {step} {number}")
        self.plan(done, seconds, ended)
        return seconds

    def lose_answers(self, number: int) -> None:
        """Nothing comes from a worker that is gone, and its tasks wait for the others alone."""
        self.events = [one for one in self.events if number not in (one.worker, getattr(one.event, "worker", -1))]
        heapq.heapify(self.events)
        for task in [task for task, waiting in self.awaited.items() if number in waiting]:
            self.awaited[task].discard(number)
            for device in [d for d, t in self.holding.items() if t in (task, -task - 1)]:
                if device == number or not self.awaited[task]:
                    del self.holding[device]
