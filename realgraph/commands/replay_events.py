"""`realgraph replay-events`: tell a Scheduler once more what it was told in a run, and show what it did. No torch."""

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.runtime.commands.actions import (
    Action,
    CheckpointWritten,
    EngineJoined,
    EngineLost,
    EngineReplaced,
    EvalEnded,
    Event,
    Halt,
    Send,
    StepEnded,
    StopRequested,
    Tick,
    WorkerLost,
)
from realgraph.runtime.commands.failures import doing_text, workers_text
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.master.event_log import DamagedLog, Diverged, LogStart, Replay, Replayed
from realgraph.runtime.scheduler.image import SchedulerImage
from realgraph.runtime.wire.protocol import Bye, Done, Failed, Generated, Heartbeat, Hello, Loaded, Met, Ready
from realgraph.screen.output import say


def replay_events_command(file: Path, last: int) -> None:
    """Print the beginning of a log, its `last` events and what is awaited then. Raises ConfigError."""
    path = RunFolder(file).events if file.is_dir() else file
    try:
        replay = Replay(path)
        say(start_text(replay.job.name, replay.start))
        shown: deque[Replayed] = deque(maxlen=last)
        n_events, halted, began = 0, False, 0.0
        for replayed in replay.events():
            shown.append(replayed)
            began = began if n_events else replayed.now
            n_events += 1
            halted = any(isinstance(action, Halt) for action in replayed.actions)
    except OSError as error:
        hint = "FILE is the events.log of a run, or the run's directory"
        raise ConfigError([Problem(Where("command line", path=str(path)), reason(error), hint)]) from error
    except DamagedLog as error:
        hint = "a log that is copied while its run writes may end anywhere, but is never changed before its end"
        raise ConfigError([Problem(Where(str(path), path=error.place), error.reason, hint)]) from error
    except Diverged as error:
        hint = "replay it with the version of realgraph that has written it"
        text = "the commands before it are not those that the run gave"
        raise ConfigError([Problem(Where(str(path), path=error.place), text, hint)]) from error
    say(f"{n_events} events replayed: the same commands as in the run; the last {len(shown)}:")
    for replayed in shown:
        say(replayed_text(replayed, began))
    if not halted:
        for line in awaited_lines(replay.scheduler.image, began):
            say(line)


def start_text(name: str, start: LogStart) -> str:
    """The place where the log starts."""
    of = f"run {name!r}, {workers_text(start.workers)}"
    if start.image is not None:
        steps = start.image.steps.completed
        return f"{of}: from the state after {start.n_before} events of this start, {steps} steps complete"
    if start.first is not None:
        return f"{of}: from the checkpoint {start.checkpoint} of {start.first.step} steps"
    return f"{of}: from its start"


def replayed_text(replayed: Replayed, began: float) -> str:
    """`12.345 s  train has ended on worker 1 (task 17) -> 2 x Drop, step 3 ended`; began: when the log did."""
    event = "the start" if replayed.event is None else event_text(replayed.event)
    done = ", ".join(actions_texts(replayed.actions)) or "nothing"
    return f"{replayed.now - began:12.3f} s  {event} -> {done}"


def event_text(event: Event) -> str:
    """One event in words."""
    match event:
        case Done():
            return f"{event.call or 'the checkpoint'} has ended on worker {event.worker} (task {event.task})"
        case Generated() | Loaded():
            skipped = f", skipped {list(event.skipped)}" if event.skipped else ""
            return f"worker {event.worker} has made groups {list(event.groups)}{skipped}"
        case Failed():
            return f"{event.call or 'the worker'} failed on worker {event.worker}: {event.error}"
        case WorkerLost():
            return f"worker {event.worker} was lost: {event.reason}"
        case EngineJoined():
            return f"new processes for {workers_text(event.workers)} are ready"
        case Tick():
            return "a deadline is reached"
        case StopRequested():
            return "the user asks for a stop"
        case Hello() | Ready() | Met() | Heartbeat() | Bye():
            return f"{type(event).__name__} of worker {event.worker}"


def actions_texts(actions: list[Action]) -> Iterator[str]:
    """Actions in words, equal commands counted."""
    for text, n in Counter(map(_action_text, actions)).items():
        yield f"{n} x {text}" if n > 1 else text


def _action_text(action: Action) -> str:
    match action:
        case Send(command=command):
            return " ".join(filter(None, (type(command).__name__, getattr(command, "call", ""))))
        case StepEnded():
            return f"step {action.step} ended"
        case EvalEnded():
            return f"the evaluation after step {action.step} ended"
        case CheckpointWritten():
            return f"the checkpoint of step {action.step} written"
        case EngineLost(text=text) | EngineReplaced(text=text):
            return text
        case Halt():
            return f"the end: {action.reason}"


def awaited_lines(image: SchedulerImage, began: float) -> Iterator[str]:
    """Lines on what the run was waiting for: tasks, and groups that workers are making."""
    yield f"{image.steps.completed} steps complete; awaited:"
    for task in image.tasks.flying:
        limit = f"since {task.started - began:.3f} s, until {task.deadline - began:.3f} s at the latest"
        yield f"  {doing_text(task)} (task {task.number}) on {workers_text(task.waiting)}, {limit}"
    for worker, (since, seconds) in image.tasks.watches.items():
        limit = f"since {since - began:.3f} s, the next until {since + seconds - began:.3f} s at the latest"
        n_groups = sum(loads.open.get(worker, 0) for loads in image.collection.loads.values())
        yield f"  {n_groups} groups of worker {worker}, {limit}"
