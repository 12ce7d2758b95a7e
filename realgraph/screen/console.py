"""A run on the screen: a live table in a terminal, plain lines elsewhere."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from realgraph.planner.report.format import WHOLE_STEP, ratio_text, seconds_text
from realgraph.runtime.master.observer import (
    CheckpointRecord,
    EvalRecord,
    Note,
    Observer,
    PlannedSeconds,
    RunEnded,
    RunRecord,
    RunStarted,
    Span,
    StepRecord,
    Transcript,
)
from realgraph.screen.terminal import Terminal

JUDGING = ("accuracy", "reward")  # metrics of an evaluation that come first
BLOCKS = "▁▂▃▄▅▆▇█"
COUNTED_STEPS = 50  # the last ones, whose median seconds the live view shows
SHARE_CELLS = 20  # of a whole step
BATCH = "batch"  # its metrics are of no call
VALUE_LOSS = ("train_critic/loss",)  # of that call alone: another call's loss is no critic's
SHOWN = (
    ("reward", ("reward/reward",)),
    ("loss", ("train/loss", "train_actor/loss")),
    ("grad norm", ("train/grad_norm", "train_actor/grad_norm")),
    ("KL to the reference", ("train/kl", "train_actor/kl", "advantage/kl")),
    ("KL of the update", ("train/approx_kl", "train_actor/approx_kl")),
    ("entropy", ("train/entropy", "train_actor/entropy")),
    ("clipped", ("train/clip_fraction", "train_actor/clip_fraction")),
    ("value loss", VALUE_LOSS),
    ("new tokens", ("rollout/new_tokens",)),
)


def sparkline(values: list[float], width: int = 60) -> str:
    """The series as block characters, its mean over equal windows where it is longer than `width`."""
    if not values:
        return ""
    n = min(width, len(values))
    windows = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    means = [sum(window) / len(window) for window in windows]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def pick(metrics: dict[str, float], names: tuple[str, ...]) -> float | None:
    """The first of these metrics that the step has; else the first call's of that name: calls are named freely."""
    named = next((metrics[name] for name in names if name in metrics), None)
    if named is not None or names == VALUE_LOSS:
        return named
    ending = f"/{names[0].partition('/')[2]}"
    of_calls = (value for name, value in metrics.items() if name.endswith(ending) and not name.startswith(f"{BATCH}/"))
    return next(of_calls, None)


def shown_metric(label: str, metrics: dict[str, float], names: tuple[str, ...]) -> str:
    """A metric worth showing; each call's by its name where several have one, and none has the usual name."""
    ending = f"/{names[0].partition('/')[2]}"
    ours = {name.removesuffix(ending): value for name, value in metrics.items() if name.endswith(ending)}
    ours.pop(BATCH, None)
    if len(ours) > 1 and names != VALUE_LOSS and not metrics.keys() & set(names):
        return f"{label} " + ", ".join(f"{call} {value:.4g}" for call, value in ours.items())
    value = pick(metrics, names)
    return f"{label} {value:.4g}" if value is not None else ""


def summary(record: StepRecord) -> str:
    """A step in one line: the metrics that it has of those worth showing."""
    parts = [text for label, names in SHOWN if (text := shown_metric(label, record.metrics, names))]
    return f"step {record.step + 1}  {record.seconds:.2f} s  " + "  ".join(parts)


class PlainLines:
    """One line an event, steps at most once in `every_seconds`."""

    def __init__(self, console: Terminal, every_seconds: float = 2.0) -> None:
        self._console, self._every = console, every_seconds
        self._last_line, self._steps = 0.0, 0

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted():
                self._steps = record.steps
                self._line(f"{record.name}: {record.graph}, steps {record.first_step} to {record.steps}")
                self._line(f"run directory: {record.run_dir}")
                self._line(f"started in {started(record)}")
            case StepRecord():
                if time.monotonic() - self._last_line >= self._every or record.step + 1 == self._steps:
                    self._last_line = time.monotonic()
                    self._line(summary(record))
            case EvalRecord():
                self._line(f"evaluation after step {record.step}: {describe(record)}")
            case CheckpointRecord():
                self._line(f"checkpoint of step {record.step}: {record.path}")
            case Note():
                self._line(record.text)
            case RunEnded():
                self._line(ended(record))
            case Span() | Transcript():
                pass

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        pass


def started(record: RunStarted) -> str:
    """`4.1 s (processes 3.2 s, models 0.6 s)`."""
    facts = record.facts
    parts = [("processes", "fork_seconds"), ("models", "load_seconds")]
    shown = ", ".join(f"{label} {facts[name]:.1f} s" for label, name in parts if name in facts)
    return f"{facts.get('start_seconds', 0.0):.1f} s" + (f" ({shown})" if shown else "")


def ended(record: RunEnded) -> str:
    """`finished after step 40`; of a failure no more, since its error stands below."""
    has_reason = record.ok or record.reason in ("stopped", "interrupted")
    return f"{record.reason if has_reason else 'failed'} after step {record.step}"


def describe(record: EvalRecord) -> str:
    """An evaluation in one line."""
    best = "  (best so far)" if record.best else ""
    in_order = sorted(record.metrics.items(), key=lambda item: (item[0] not in JUDGING, item[0]))
    shown = {name: value for name, value in in_order if value or name != "skipped"}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items()) + best


class LiveScreen:
    """A live view: progress, reward curve, metrics, and where the time goes, call by call, as planned and measured."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._live: Live | None = None
        self._start: RunStarted | None = None
        self._step: StepRecord | None = None
        self._eval: EvalRecord | None = None
        self._rewards: list[float] = []
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=COUNTED_STEPS))
        self._began = time.monotonic()

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted():
                self._start, self._began = record, time.monotonic()
                self._console.print(
                    Text.assemble(
                        (record.name, "bold"),
                        f"  run directory: {record.run_dir}  ",
                        (f"started in {started(record)}", "dim"),
                    )
                )
                self._live = Live(self._view(), console=self._console, refresh_per_second=8, transient=False)
                self._live.start()
            case StepRecord():
                self._step = record
                for name in self._names():
                    if (seconds := record.metrics.get(f"{name}/seconds")) is not None:
                        self._seconds[name].append(seconds)
                self._seconds[WHOLE_STEP].append(record.seconds)
                reward = pick(record.metrics, SHOWN[0][1])
                loss = pick(record.metrics, SHOWN[1][1])
                self._rewards.append(reward if reward is not None else -(loss or 0.0))
            case EvalRecord():
                self._eval = record
            case Note():
                style = {"info": "dim", "warning": "yellow", "error": "bold red"}[record.level]
                self._console.print(Text(record.text, style=style))
            case RunEnded():
                self._refresh()
                self._stop()
                style = "green" if record.ok else "bold red"
                self._console.print(Text(ended(record), style=style))
            case CheckpointRecord() | Transcript() | Span():
                pass
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _view(self) -> RenderableType:
        assert self._start is not None
        done = self._step.step + 1 if self._step else self._start.first_step
        here = done - self._start.first_step
        elapsed = time.monotonic() - self._began
        left = elapsed / here * (self._start.steps - done) if here else 0.0
        head = Table.grid(padding=(0, 1))
        head.add_row(
            f"step {done}/{self._start.steps}",
            ProgressBar(total=self._start.steps, completed=done, width=40),
            f"{elapsed:.0f} s, {left:.0f} s left" if here else f"{elapsed:.0f} s",
        )
        label = "reward" if self._step and pick(self._step.metrics, SHOWN[0][1]) is not None else "-loss"
        curve = Text.assemble((f"{label} ", "dim"), (sparkline(self._rewards), "green"))
        parts: list[RenderableType] = [head, curve]
        if self._step is not None:
            parts.append(Text(summary(self._step)))
        if self._eval is not None:
            parts.append(Text(f"held out, after step {self._eval.step}: {describe(self._eval)}", style="cyan"))
        parts.append(self._calls())
        return Panel(Group(*parts), title=Text(f"realgraph: {self._start.graph}"), title_align="left")

    def _names(self) -> Iterator[str]:
        """The calls of the graph, and what else the plan has predictions of."""
        if self._start is not None:
            yield from dict.fromkeys((*self._start.calls, *self._start.planned.calls))

    def _calls(self) -> Table:
        """A row for the step and for each call that is planned or was measured; medians over the last steps."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("call")
        for name in ("predicted", "measured", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("share of the step")
        planned = self._start.planned if self._start else PlannedSeconds()
        predicted = {WHOLE_STEP: planned.step, **planned.calls}
        taken = {name: median(seconds) for name, seconds in self._seconds.items() if seconds}
        step = taken.get(WHOLE_STEP, 0.0)
        for name in (WHOLE_STEP, *self._names()):
            expected, measured = predicted.get(name, 0.0), taken.get(name)
            if not expected and measured is None:
                continue
            bar: RenderableType = ""
            if step and measured is not None and name != WHOLE_STEP:
                bar = ProgressBar(total=step, completed=min(step, measured), width=SHARE_CELLS)
            table.add_row(
                name,
                seconds_text(expected) if expected else "",
                seconds_text(measured) if measured is not None else "",
                ratio_text(expected, measured) if expected and measured is not None else "",
                bar,
            )
        return table

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def close(self) -> None:
        self._stop()


class EvaluationLines(PlainLines):
    """The result of an evaluation by itself: a run of no steps, which no step count or progress describes."""

    def __init__(self, console: Terminal, of_what: str) -> None:
        super().__init__(console)
        self._of_what = of_what

    def observe(self, record: RunRecord) -> None:
        match record:
            case RunStarted():
                self._line(f"run directory: {record.run_dir}")
                self._line(f"started in {started(record)}")
            case EvalRecord():
                self._line(f"{self._of_what}: {describe(msgspec.structs.replace(record, best=False))}")
            case RunEnded() if record.ok:
                pass  # the result says it
            case _:
                super().observe(record)


def screen(console: Terminal) -> Observer:
    """The live view in a terminal, plain lines elsewhere."""
    return LiveScreen(console) if console.is_terminal else PlainLines(console)
