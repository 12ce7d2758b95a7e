"""Judge the audit of a run that wrote one (`outputs.audit: true`): was the age bound kept in every loss, and under
`interrupt: wait` every sample drawn by one version of the weights?

Run from the repository root: `python -m benchmarks.audit RUN_DIR`. Trainers wrote the record, from the batches that
their losses were evaluated on; the judgement shares no code with them, nor with the scheduler. A resumed run repeats
the steps from where it goes on: what it had made of them before counts no more.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from msgspec import Struct

from realgraph.graphs.functions import sample_filter
from realgraph.graphs.spec import Generate, Train
from realgraph.runtime.job.audit import NO_VERSION, AuditRecord, AuditSample
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.job.sample_ids import group_of


class Promise(Struct, frozen=True):
    """The promises of a run. bound: None where any age is allowed. trains: of each train call, the train calls a step
    of the role whose samples it learns from, 0 where these never age. epochs: of each train call. n_samples: of a step.
    least: where a function leaves samples out, what each of the `n_groups` groups of a step has at least, of as many as
    `n_samples` allow for each."""

    bound: int | None
    trains: dict[str, int]
    epochs: dict[str, int]
    n_samples: int
    n_groups: int = 0
    least: int | None = None  # None: no function leaves samples out
    of_data: frozenset[str] = frozenset()  # train calls that meet one sequence of the data a group, of no age
    one_version: bool = False  # of the weights that drew a sample: new ones have waited for it


class Start(Struct, frozen=True):
    """A start of the run, the first or a later one, at its first step."""

    time: float
    step: int


class Judgement(Struct, frozen=True):
    """problems: a line for each broken promise. ages: of the tokens that losses used, by call: age in steps -> tokens;
    left_out: of the others, for their age, with their pair, or since their sample had no part in the loss at all.
    groups: that were trained, ascending, by step."""

    problems: tuple[str, ...]
    ages: dict[str, dict[int, int]]
    left_out: dict[str, dict[int, int]]
    groups: dict[int, list[int]]


def judge(records: Sequence[AuditRecord], starts: Sequence[Start], promise: Promise) -> Judgement:
    """Every token of every loss against the bound, every sample against once per train call and epoch."""
    valid = [record for record in records if not _repeated(record, starts)]
    problems = [text for record in valid for text in _wrong_ages(record, promise)]
    ages: dict[str, Counter[int]] = {call: Counter() for call in promise.epochs}
    left_out: dict[str, Counter[int]] = {call: Counter() for call in promise.epochs}
    groups: dict[int, set[int]] = {}
    for record in valid:
        groups.setdefault(record.step, set()).update(group_of(sample.sample) for sample in record.samples)
        for sample in record.samples:
            for span in sample.spans:
                counts = ages if span.used else left_out
                counts[record.call][_age(record, span.version, promise)] += span.n_tokens
    problems += _wrong_counts(valid, promise)
    trained = {step: sorted(found) for step, found in groups.items()}
    return Judgement(tuple(problems), _plain(ages), _plain(left_out), trained)


def _plain(counts: dict[str, Counter[int]]) -> dict[str, dict[int, int]]:
    return {call: dict(sorted(found.items())) for call, found in counts.items()}


def _repeated(record: AuditRecord, starts: Sequence[Start]) -> bool:
    return any(start.time > record.time and start.step <= record.step for start in starts)


def _age(record: AuditRecord, version: int, promise: Promise) -> int:
    trains = promise.trains[record.call]
    return record.step - version // trains if trains else 0


def _wrong_ages(record: AuditRecord, promise: Promise) -> Iterator[str]:
    """Tokens in the loss that are older than the bound, or of weights that were still to come; samples of more weights
    than one, where there may be none."""
    for sample in record.samples:
        for span in sample.spans:
            age = _age(record, span.version, promise)
            tokens = f"{record.call} of step {record.step}: {span.n_tokens} tokens of sample {sample.sample}"
            if span.used and promise.bound is not None and age > promise.bound:
                yield f"{tokens} are {age} steps old, {promise.bound} are allowed"
            elif age < 0:
                yield f"{tokens} are of weights that were not there: version {span.version}"
        versions = sorted({span.version for span in sample.spans} - {NO_VERSION})
        if promise.one_version and len(versions) > 1:
            yield f"{record.call} of step {record.step}: sample {sample.sample} was drawn by versions {versions}"


def _wrong_counts(records: Sequence[AuditRecord], promise: Promise) -> Iterator[str]:
    """Samples that a train call has met more or less often than once an epoch, or in two steps."""
    first_step: dict[tuple[str, int], int] = {}
    by_call = sorted(records, key=lambda record: (record.call, record.step))
    for (call, step), parts in groupby(by_call, key=lambda record: (record.call, record.step)):
        samples = [sample for part in parts for sample in part.samples]
        counts = Counter(sample.sample for sample in samples)
        for sample, count in sorted(counts.items()):
            if count != promise.epochs[call]:
                yield f"{call} of step {step} met sample {sample} {count} times, not {promise.epochs[call]}"
            earlier = first_step.setdefault((call, sample), step)
            if earlier != step:
                yield f"{call} met sample {sample} in step {earlier} and again in step {step}"
        if call in promise.of_data:
            n_met = len(counts), len(set(map(group_of, counts)))
            if n_met != (promise.n_groups, promise.n_groups):
                yield f"{call} of step {step} met {n_met[0]} sequences of {n_met[1]} groups, not {promise.n_groups}"
        elif promise.least is not None:
            yield from _wrong_sizes(f"{call} of step {step}", Counter(map(group_of, counts)), promise, promise.least)
        elif len(counts) != promise.n_samples:
            yield f"{call} of step {step} met {len(counts)} samples, not {promise.n_samples}"
        yield from _split_tokens(call, step, samples)


def _wrong_sizes(what: str, sizes: Counter[int], promise: Promise, least: int) -> Iterator[str]:
    """Groups that have gone on with fewer samples than they may, or have more than were made, and too many or few."""
    most = promise.n_samples // promise.n_groups
    if len(sizes) != promise.n_groups:
        yield f"{what} met {len(sizes)} groups, not {promise.n_groups}"
    for group, size in sorted(sizes.items()):
        if not least <= size <= most:
            yield f"{what} met {size} samples of group {group}, not {least} to {most}"


def _split_tokens(call: str, step: int, samples: Sequence[AuditSample]) -> Iterator[str]:
    """Samples that have other tokens in one epoch than in another."""
    tokens: dict[int, set[int]] = {}
    for sample in samples:
        tokens.setdefault(sample.sample, set()).add(sum(span.n_tokens for span in sample.spans))
    for number, found in sorted(tokens.items()):
        if len(found) > 1:
            yield f"{call} of step {step} met sample {number} with {sorted(found)} sampled tokens"


# --- a run's own ------------------------------------------------------------------------------------------------------


def promise_of(job: Job) -> Promise:
    """Those of the run of this job."""
    calls = job.graph.calls
    trains = {name: call for name, call in calls.items() if isinstance(call, Train)}
    drawn_by = {name: calls.get(job.graph.sampler(name)) for name in trains}
    roles = {name: call.model for name, call in drawn_by.items() if isinstance(call, Generate)}
    return Promise(
        bound=None if job.overdue == "allow" else job.staleness,
        trains={name: sum(call.model == roles.get(name) for call in trains.values()) for name in trains},
        epochs={name: call.epochs for name, call in trains.items()},
        n_samples=job.batch.groups * job.graph.samples_per_group,
        n_groups=job.batch.groups,
        least=job.graph.least_samples if sample_filter(calls) else None,
        of_data=frozenset(name for name in trains if job.graph.works_on_data(name)),
        one_version=job.rollout.interrupt == "wait" and job.plan.staleness > 0,
    )


def judge_run(folder: Path) -> Judgement:
    """The record in a run directory. Raises OSError, msgspec.DecodeError."""
    run = RunFolder(folder)
    job = msgspec.json.decode(run.job.read_bytes(), type=Job)
    decode = msgspec.json.Decoder(AuditRecord).decode
    files = sorted(run.audit.glob("worker-*.jsonl"))
    records = [decode(line) for file in files for line in file.read_bytes().splitlines()]
    lines = [msgspec.json.decode(line) for line in run.metrics.read_bytes().splitlines()]
    starts = [Start(line["time"], line["first_step"]) for line in lines if line["type"] == "start"]
    return judge(records, starts, promise_of(job))


def main(folder: str) -> int:
    """Print the ages and every broken promise; 1 where there is one."""
    found = judge_run(Path(folder))
    for call, ages in found.ages.items():
        left, total = found.left_out[call], sum(ages.values()) + sum(found.left_out[call].values())
        print(f"{call}: {total} sampled tokens; in the loss {_shown(ages, total)}; left out {_shown(left, total)}")
    for problem in found.problems:
        print(f"  {problem}")
    print(f"{'FAIL' if found.problems else 'PASS'}: {len(found.problems)} broken promises")
    return 1 if found.problems else 0


def _shown(ages: dict[int, int], total: int) -> str:
    return ", ".join(f"{n_tokens / max(1, total):.1%} of age {age}" for age, n_tokens in ages.items()) or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
