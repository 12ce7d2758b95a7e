"""Messages for the user when a run cannot go on: which call, which worker, which sample, since when."""

from collections.abc import Sequence

from realgraph.runtime.commands.tasks import Task, TaskImage
from realgraph.runtime.wire.protocol import Failed


def workers_text(workers: Sequence[int]) -> str:
    """`worker 3`, `workers 0, 1, 2`, or `workers 0, 1, 2 and 1021 more`."""
    listed = sorted(workers)
    shown = ", ".join(str(worker) for worker in listed[:8])
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"worker{'s' if len(listed) > 1 else ''} {shown}{more}"


def doing_text(task: Task | TaskImage) -> str:
    """`actor_train of step 3`."""
    match task.kind:
        case "save":
            return f"the checkpoint of step {task.step}"
        case "evaluate":
            part = f"{task.call} of " if task.call not in ("", "evaluate") else ""  # by the loss, call by call
            return f"{part}the evaluation after step {task.step}"
        case "reallocate":
            return f"the reallocation of weights for {task.call}"
        case "prefetch":
            return f"gathering the inputs of {task.call} of step {task.step}"
        case "stream" | "call":
            return f"{task.call} of step {task.step}"


def failed_text(error: Failed) -> str:
    """`reward failed on worker 1, sample 37: ...`."""
    sample = f", sample {error.sample}" if error.sample >= 0 else ""
    return f"{error.call or 'the worker'} failed on worker {error.worker}{sample}: {error.error}"


def late(task: Task, now: float) -> Failed:
    """A task that is past its deadline."""
    workers = sorted(task.waiting)
    seconds, allowed = now - task.started, task.deadline - task.started
    text = f"{doing_text(task)} has not ended on {workers_text(workers)} after {seconds:.0f} s (limit {allowed:.0f} s)"
    return Failed(workers[0], task.call, text, kind="deadline", late=tuple(workers))


def silent(worker: int, call: str, n_groups: int, seconds: float) -> Failed:
    """A worker that owes groups and has sent none for too long."""
    text = f"{call or 'loading data'} has not finished any of {n_groups} groups on worker {worker} for {seconds:.0f} s"
    return Failed(worker, call, text, kind="deadline", late=(worker,))


def lost(worker: int, reason: str, doing: str, call: str) -> Failed:
    """A worker that is gone."""
    return Failed(worker, call, f"worker {worker} was lost {doing}: {reason}", kind="worker")


def prompt_limits(prompted: Sequence[str]) -> tuple[str, ...]:
    """The settings that say how long prompts may be: of the data, and of `prompted`, the generate calls whose prompts
    other calls write."""
    return ("data.max_prompt_tokens", *(f"calls.{name}.max_prompt_tokens" for name in prompted))


def all_discarded(worker: int, call: str, n_groups: int, n_skipped: int, prompted: Sequence[str] = ()) -> Failed:
    """Nothing but groups that are left out. prompted: see `prompt_limits`."""
    text = (
        f"the last {n_groups} prompt groups in a row were all left out ({n_skipped} with prompts over "
        f"{' or '.join(prompt_limits(prompted))}, {n_groups - n_skipped} filtered out): there is nothing to train on"
    )
    return Failed(worker, call, text, kind="data")


def stalled(worker: int, waiting: Sequence[str]) -> Failed:
    """Nothing runs, nothing can start, and the run is not at its end."""
    text = f"the plan's orders block each other: nothing runs, and next in turn are {', '.join(waiting) or 'no calls'}"
    return Failed(worker, waiting[0].split(" ")[0] if waiting else "", text)
