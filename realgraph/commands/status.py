"""`realgraph status`: what a run does right now, asked of its directory. Disturbs nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.planner.report.format import seconds_text
from realgraph.run.resume import run_at
from realgraph.runtime.commands.failures import workers_text
from realgraph.runtime.job.run_folder import in_use
from realgraph.runtime.master.status import RunStatus, WorkerStatus, read_status
from realgraph.screen.terminal import run_terminal

OLD_SECONDS = 5.0  # a status that a live run would have replaced


def status_command(root: Path) -> None:
    """Raises ConfigError."""
    folder = run_at(root)
    try:
        status = read_status(folder.status)
    except (OSError, ValueError) as error:
        text = reason(error) if isinstance(error, OSError) else "it is no status of a run"
        raise ConfigError([Problem(Where(str(folder.status)), text, "ask again in a second")]) from None
    console = run_terminal()
    if not in_use(folder):
        saved = folder.latest()
        console.print(f"no process runs it; newest checkpoint: {saved if saved else 'none'}", soft_wrap=True)
    elif status is None:
        console.print("it is starting, or ending: it has no workers that are ready", soft_wrap=True)
    else:
        for line in _lines(status, time.time()):
            console.print(line, soft_wrap=True)
        console.print(_table(status))


def _lines(status: RunStatus, now: float) -> Iterator[str]:
    yield f"{status.name}: step {status.steps_done} of {status.steps} done, process {status.pid}"
    if status.restarts:
        yield f"it has restarted by itself {status.restarts} time{'s' * (status.restarts > 1)} (runtime.restarts)"
    if status.lost:
        yield f"it goes on without {workers_text(status.lost)}, which was lost"
    if status.replaced:
        yield f"a new process is in the place of {workers_text(status.replaced)}"
    age = now - status.time
    if age > OLD_SECONDS:
        yield f"warning: its master has written nothing for {age:.0f} s: it is stopped, or its disk stands still"
    if status.step_seconds:
        yield f"{seconds_text(status.step_seconds)} a step, about {_duration(status.seconds_left)} to the end"
    if status.groups:
        groups = ", ".join(f"{n} {state}" for state, n in sorted(status.groups.items()))
        behind = (
            f"; the oldest tokens {status.lag} of at most {status.staleness} steps behind" if status.staleness else ""
        )
        yield f"prompt groups: {groups}{behind}"


def _table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "host", "does", "for", "limit", "last sign", "memory"):
        table.add_column(heading)
    for worker in status.workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    signs = worker.signs
    memory = signs.device_bytes or signs.host_bytes
    return (
        str(worker.worker),
        signs.host.removeprefix("host ") or "this one",
        worker.doing or "waits",
        f"{worker.seconds:.1f} s" if worker.doing else "",
        f"{worker.limit_seconds:.0f} s" if worker.doing else "",
        f"{signs.silent_seconds:.1f} s ago",
        f"{memory / 1e9:.2f} GB",
    )


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), round(seconds / 3600, 1)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours} h"
