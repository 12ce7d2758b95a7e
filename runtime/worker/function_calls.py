"""Function calls of one worker: inputs from the stores, units to the subprocesses, results back into the store."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from realgraph.graphs.functions import KEEP
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import TEXT, TOKENS, is_prompt
from realgraph.graphs.spec import Function
from realgraph.runtime.functions.functions import Unit, UnitResult, keywords_of
from realgraph.runtime.functions.host import EarlyUnit, FunctionHost
from realgraph.runtime.functions.rewards import INLINE
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import group_of, place_of, sample_ids
from realgraph.runtime.store.assemble import Assembler, Values, decode_value
from realgraph.runtime.store.inputs import Inputs
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Execute, SampleSource

log = logging.getLogger(__name__)


class FunctionFailed(Exception):
    """A unit failed, and the call's policy is to fail the run. sample: the one to blame, -1 for a group or batch."""

    def __init__(self, result: UnitResult) -> None:
        super().__init__(result.error)
        self.sample, self.detail = result.sample, result.detail


class PromptTexts(NamedTuple):
    """decode: token ids to text. prompt: the text of a group's prompt, for transcripts."""

    decode: Callable[[Sequence[int]], str]
    prompt: Callable[[int], str]


class FunctionCalls:
    """Runs function calls. Safe to use from several threads."""

    def __init__(
        self, job: Job, assembler: Assembler, inputs: Inputs, host: FunctionHost, worker: int, texts: PromptTexts
    ) -> None:
        self._graph, self._assembler, self._host, self._worker = job.graph, assembler, host, worker
        self._inputs = inputs
        self._texts = texts
        self._outputs, self._groups = job.outputs, job.batch.groups
        self._early: dict[tuple[str, int], EarlyUnit] = {}  # by call and sample
        self._of_samples = [name for name in job.graph.sample_functions if _function(job.graph, name).fn not in INLINE]

    @property
    def begins_early(self) -> bool:
        """True where a function can run on a sample whose group is not whole."""
        return bool(self._of_samples)

    def begin(self, samples: Sequence[int]) -> None:
        """Start what these samples are enough for, whose keys are in this worker's store; `run` takes what it gives."""
        for name in self._of_samples:
            call = _function(self._graph, name)
            source = SampleSource(self._worker, self._graph.reads[name], tuple(samples))
            values = self._assembler.gather([source], samples)
            early = self._host.begin(call, [self.unit(name, [sample], values) for sample in samples])
            self._early |= {(name, sample): one for sample, one in zip(samples, early, strict=True)}

    def forget(self, groups: Sequence[int]) -> None:
        """No command will come for the samples of these."""
        samples = [sample for group in groups for sample in sample_ids(group, self._graph.samples_per_group)]
        for name, sample in itertools.product(self._of_samples, samples):
            if (early := self._early.pop((name, sample), None)) is not None:
                early.drop()

    def run(self, command: Execute) -> Done:
        """Run one call over the command's units; what it writes is in the store afterwards. Raises FunctionFailed."""
        started = time.time()
        call = _function(self._graph, command.call)
        samples = [sample for share in command.shares for sample in share]
        elsewhere = any(source.worker != self._worker for source in command.sources)  # it may have been fetched ahead
        values = self._gathered(command) if elsewhere else self._assembler.gather(command.sources, samples)
        begun = [self._early.pop((command.call, share[0]), None) for share in command.shares]
        early = {place: one for place, one in enumerate(begun) if one is not None}
        units = [
            early[place].unit if place in early else self.unit(command.call, share, values)
            for place, share in enumerate(command.shares)
        ]
        results = self._host.run(command.call, call, units, command.deadline_seconds, early)
        for result in results:
            if result.error and call.on_error == "fail":
                raise FunctionFailed(result)
        left_out, means = self._put(command.call, units, results)
        if call.on_error == "score":  # those without a failure count, too: it is a share of all units of the step
            _log_failures(command.call, results)
            failed = {unit.samples[0]: bool(result.error) for unit, result in zip(units, results, strict=True)}
            means["failed"] = _of_groups(failed, {unit.samples[0]: unit.groups[0] for unit in units})
        whole = call.over == "batch"
        of_batch = {name: sum(by_group.values(), Mean(0.0, 0.0)) for name, by_group in means.items()}
        return Done(
            worker=self._worker,
            task=command.task,
            call="evaluate" if command.held_out else command.call,
            metrics=of_batch if whole else {},
            left_out=left_out,
            by_group={} if whole else _transposed(means),
            started=started,
            ended=time.time(),
            arrived=self._assembler.arrived(command.sources, values),
            transcripts=self._transcripts(command, units, results),
        )

    def _gathered(self, command: Execute) -> Values:
        self._inputs.begin(command)
        return self._inputs.take(command)

    def _transcripts(self, command: Execute, units: Sequence[Unit], results: Sequence[UnitResult]) -> tuple[str, ...]:
        """Every so many steps: some samples with their score, of a call that scores text. One of a group."""
        every = self._outputs.transcripts_every
        writes = self._graph.writes[command.call]
        if not every or command.step % every or not writes or command.held_out:
            return ()
        shown = []
        for unit, result in zip(units, results, strict=True):
            group, text = group_of(unit.samples[0]), unit.kwargs.get(TEXT)
            chosen = place_of(unit.samples[0]) == 0 and group % self._groups < self._outputs.transcripts
            if chosen and isinstance(text, str) and isinstance(result.values.get(writes[0]), float):
                shown.append(f"{self._texts.prompt(group)}{text}  [{writes[0]} {result.values[writes[0]]:.3g}]")
        return tuple(shown)

    def unit(self, name: str, samples: Sequence[int], values: Values) -> Unit:
        """The keywords of one unit: single values for a sample, lists for a group or batch."""
        call = _function(self._graph, name)
        given: dict[str, Any] = {}
        for key in self._graph.reads[name]:
            kind = self._graph.keys[key].type
            rows = [decode_value(self._assembler.value(values, key, sample), kind) for sample in samples]
            single = call.over == "sample" or (call.over == "group" and kind.level == "group")
            given[key] = rows[0] if single else rows
        prompts = [key for key in given if is_prompt(self._graph.keys[key].type)]
        lengths: tuple[int, ...] = ()
        tokens = next((key for key in values if key.rpartition(".")[2] == TOKENS), None)
        if tokens is not None:
            lengths = tuple(len(self._assembler.value(values, tokens, sample)) for sample in samples)
        groups = tuple(self._assembler.group(sample) for sample in samples)
        return Unit(tuple(samples), keywords_of(call, given, prompts, self._texts.decode), groups, lengths)

    def _put(
        self, name: str, units: Sequence[Unit], results: Sequence[UnitResult]
    ) -> tuple[dict[int, tuple[int, ...]], dict[str, dict[int, Mean]]]:
        """Store what the units gave; (samples that the call leaves out by group, means of the numbers for the metrics:
        name -> group)."""
        call = _function(self._graph, name)
        left_out: dict[int, tuple[int, ...]] = {}
        means: dict[str, dict[int, Mean]] = {}
        members = {sample: group for unit in units for sample, group in zip(unit.samples, unit.groups, strict=True)}
        groups = dict(zip(members.values(), members.values(), strict=True))
        for key in self._graph.writes[name]:
            kind = self._graph.keys[key].type
            column: dict[int, Any] = {}
            for unit, result in zip(units, results, strict=True):
                column |= _by_id(unit, result.values[key], by_group=kind.level == "group", over=call.over)
            self._assembler.put_values(key, tuple(column), tuple(column.values()))
            if key == KEEP:
                left_out = _left_out(units, column, by_group=kind.level == "group")
            if kind.level != "token" and kind.dtype in ("bool", "int32", "int64", "float32", "float64"):
                means[key] = _of_groups(column, groups if kind.level == "group" else members)
        return left_out, means


def _function(graph: Graph, name: str) -> Function:
    call = graph.calls[name]
    assert isinstance(call, Function)
    return call


def _log_failures(name: str, results: Sequence[UnitResult]) -> None:
    """Write the first of the failures that have an `error_value` to the worker's log, with its traceback."""
    failed = [result for result in results if result.error]
    if failed:
        n, first = len(failed), failed[0]
        log.warning("%d of %d executions of %s failed, first: %s\n%s", n, len(results), name, first.error, first.detail)


def _of_groups(column: Mapping[int, float], groups: Mapping[int, int]) -> dict[int, Mean]:
    """Group -> the mean over it. groups: what the column goes by -> group."""
    found: dict[int, Mean] = {}
    for number, value in column.items():
        group = groups[number]
        found[group] = found.get(group, Mean(0.0, 0.0)) + Mean(float(value))
    return found


def _transposed(means: Mapping[str, Mapping[int, Mean]]) -> dict[int, dict[str, Mean]]:
    found: dict[int, dict[str, Mean]] = {}
    for name, by_group in means.items():
        for group, mean in by_group.items():
            found.setdefault(group, {})[name] = mean
    return found


def _left_out(units: Sequence[Unit], keep: Mapping[int, Any], *, by_group: bool) -> dict[int, tuple[int, ...]]:
    """Group -> the samples of it that are not kept. keep: by group or by sample id."""
    found: dict[int, tuple[int, ...]] = {}
    for sample, group in [pair for unit in units for pair in zip(unit.samples, unit.groups, strict=True)]:
        if not keep[group if by_group else sample]:
            found[group] = (*found.get(group, ()), sample)
    return found


def _by_id(unit: Unit, value: Any, *, by_group: bool, over: str) -> Mapping[int, Any]:
    """A unit's value of one key, by sample or by group id."""
    if by_group:
        groups = tuple(dict.fromkeys(unit.groups))
        return dict(zip(groups, value, strict=True)) if over == "batch" else {groups[0]: value}
    if over == "sample":
        return {unit.samples[0]: value}
    return dict(zip(unit.samples, value, strict=True))
