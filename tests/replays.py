"""A Scheduler that logs what it is told, as the master does, and the replay of such a log."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from realgraph.runtime.commands.actions import Action, Checkpointed, Event
from realgraph.runtime.job.job import Job
from realgraph.runtime.master.event_log import EventLog, LogStart, Replay, Replayed
from realgraph.runtime.scheduler.scheduler import Scheduler


class LoggedScheduler(Scheduler):
    """Writes a log at `path`; `answers`: all that it has ever been told, with its actions."""

    def __init__(
        self, path: Path, most_bytes: int, job: Job, workers: Sequence[int], state: Checkpointed | None = None
    ) -> None:
        super().__init__(job, workers, 1000, state, 5)
        self.answers: list[tuple[Event | None, float, list[Action]]] = []
        self.log = EventLog(path, most_bytes, LogStart(msgspec.json.encode(job), tuple(workers), 1000, 5, state))

    def start(self, now: float) -> list[Action]:
        return self._logged(None, now)

    def on(self, event: Event, now: float) -> list[Action]:
        return self._logged(event, now)

    def _logged(self, event: Event | None, now: float) -> list[Action]:
        self.log.record(event, now, lambda: self.image)
        actions = super().start(now) if event is None else super().on(event, now)
        self.log.acted(actions)
        self.answers.append((event, now, actions))
        return actions


def replayed(path: Path) -> tuple[Replay, list[Replayed]]:
    """A log replayed to its end."""
    replay = Replay(path)
    return replay, list(replay.events())
