"""The costs.json that a real run leaves, and a real profile of a few cases on two processes."""

import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from realgraph.cli import app
from realgraph.graphs.errors import ConfigError
from realgraph.planner.costs.calibrate.fit_profile import predicted_seconds, profiled
from realgraph.planner.costs.calibrate.measurements import (
    Collective,
    DecodeCase,
    DeviceCopy,
    Gemm,
    HostLink,
    Pass,
    ProfileTask,
    RolloutCase,
)
from realgraph.planner.costs.calibrate.measurements import toy_model as toy
from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import Gpu, Probe, resolve
from realgraph.planner.request.cost_table import COSTS_FILE, CostTable, load_costs
from realgraph.planner.request.request import at_staleness, call_hashes
from realgraph.planner.search.search import reprice
from realgraph.profile.command import ProfileRequest, machine_of, profile_command
from realgraph.run.costs_record import MOST_STEPS, CostsFile, Planned, SomeSteps, costs_of, covered, with_lengths
from realgraph.run.running import prepare
from realgraph.runtime.master.observer import RunEnded, RunStarted, Span, StepRecord
from realgraph.runtime.profile.launch import measure
from realgraph.runtime.profile.worker import still_falls
from tests.runs import GRPO, apart, finish, home, merged, records, write_run

__all__ = ["home"]

NODE = resolve(ClusterSpec(kind="cpu", devices=2), Probe(cores=2, host_memory_bytes=8_000_000_000))
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
SMALL = toy(64, 2, 16)
APART = {"allocation": {"train": {"first": 0, "devices": 1}, "rollout": {"first": 1, "devices": 1}}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["together", "apart"])
def test_a_finished_run_leaves_what_its_calls_took(home: Path, name: str) -> None:
    file = write_run(home, name, merged(GRPO, APART if name == "apart" else {}), {"steps": 8})
    finish(home, "run", str(file), name=name)
    table = load_costs(home / name)
    assert table.kind == "cpu"
    assert datetime.fromisoformat(table.date).tzinfo is not None
    calls = {call.call: call for call in table.calls}
    assert set(calls) == {"rollout", "train"} | ({"reallocate:rollout"} if name == "apart" else set())
    steps = records(home / name)[2:]
    for call in calls.values():
        metric = call.call.partition(":")[0]
        seconds = sorted(step["metrics"][f"{metric}/seconds"] for step in steps)
        assert seconds[0] <= call.seconds <= seconds[-1]
        assert call.predicted_seconds > 0
        assert call.error >= 0
        assert call.count == len(steps)
        assert call.devices == (1 if name == "apart" else 2)
        assert table.phases[call.phase].factor > 0
    lengths = [length for step in steps for length in step["lengths"]]
    assert min(lengths) <= table.lengths[0] <= table.lengths[-1] <= max(lengths)
    assert list(table.lengths) == sorted(table.lengths)
    request = prepare(file, (), None).request
    assert (calls["train"].model, calls["train"].workload) == call_hashes(request, "train")


def planned(home: Path) -> Planned:
    found = prepare(write_run(home, "planned", GRPO), (), None)
    return Planned("planned", found.request, found.job.plan)


def steps(seconds: list[float]) -> list[StepRecord]:
    """Steps that took so long, of 32 samples with 4 prompt and 3 new tokens each."""
    sizes = {"batch/samples": 32.0, "batch/tokens": 224.0, "batch/new_tokens": 96.0}
    return [
        StepRecord(i, value, {"rollout/seconds": value, "train/seconds": 2 * value, **sizes}, 0.0, (2, 3, 4))
        for i, value in enumerate(seconds)
    ]


def test_the_first_steps_do_not_count_and_lengths_do(home: Path) -> None:
    run, now = planned(home), datetime.now(UTC)
    assert costs_of(run, [], now) is None
    assert costs_of(run, steps([5.0]), now) is None
    few, many = costs_of(run, steps([5.0, 1.0, 1.2]), now), costs_of(run, steps([9.0, 5.0] + [1.0] * 10), now)
    assert few is not None
    assert many is not None
    assert {call.call: call.seconds for call in few.calls} == pytest.approx({"rollout": 1.1, "train": 2.2})
    assert {call.call: call.seconds for call in many.calls} == pytest.approx({"rollout": 1.0, "train": 2.0})
    assert {call.error for call in many.calls} == {0.0}
    assert set(many.lengths) == {2, 3, 4}
    longer = steps([1.0] * 4)
    longer = [
        replace(step, metrics=step.metrics | {"batch/tokens": 2240.0, "batch/new_tokens": 960.0}) for step in longer
    ]
    assert (found := costs_of(run, longer, now)) is not None
    assert found.calls[1].predicted_seconds > many.calls[1].predicted_seconds


def test_what_a_step_takes_beside_its_calls_counts_once(home: Path, tmp_path: Path) -> None:
    """Each step: rollout 1 s, a function of 0.5 s, train 2 s, evaluation 3 s partly beside it, 0.25 s of nothing."""
    run = planned(home)
    observer = CostsFile(run, tmp_path / COSTS_FILE)
    for number in range(5):
        at = 10.0 * number
        for worker in (0, 1):
            observer.observe(Span(worker, "rollout", number, at, at + 1.0))
            observer.observe(Span(worker, "reward", number, at + 0.9, at + 1.5))
            observer.observe(Span(worker, "train", number, at + 1.5, at + 3.5 - worker / 10))
        observer.observe(Span(0, "evaluate", -1, at + 3.0, at + 6.0))
        observer.observe(StepRecord(number, 6.25, steps([1.0])[0].metrics))
    observer.observe(RunEnded(5, "finished", True))
    table = load_costs(tmp_path)
    plan = run.plan
    free = plan.period_seconds - covered(
        (plan.starts[name], plan.starts[name] + one.seconds) for name, one in plan.allocations.items()
    )
    assert table.step_end_seconds == pytest.approx(0.75 - free)  # 0.5 s of the function, less what the plan knows of it
    again = reprice(replace(run.request, costs=table), plan)
    last = max(again.allocations.values(), key=lambda one: one.step_end_seconds)
    assert (last.step_end_seconds, again.allocations["train"]) == (table.step_end_seconds, last)
    assert again.period_seconds == pytest.approx(1.0 + 2.0 + 0.75, abs=0.05)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
def test_covered_time_is_counted_once(spans: list[tuple[int, int]]) -> None:
    seconds = {at + i for at, n in spans for i in range(n)}
    assert covered((at, at + n) for at, n in spans) == len(seconds)


def test_generation_that_overlaps_other_steps_is_left_out(home: Path) -> None:
    run = planned(home)
    stale = replace(run, request=at_staleness(run.request, 2), plan=replace(run.plan, staleness=2))
    table = costs_of(stale, steps([1.0] * 5), datetime.now(UTC))
    assert table is not None
    assert [call.call for call in table.calls] == ["train"]


STALE = {"staleness": 2, "calls": {"train": {"loss": {"terms": {"policy": {"off_policy": {"kind": "decoupled"}}}}}}}


@pytest.mark.parametrize(("queue_seconds", "of"), [(3.0, "training"), (0.1, "generation")])
def test_an_asynchronous_run_leaves_what_decides_its_steps(
    home: Path, tmp_path: Path, queue_seconds: float, of: str
) -> None:
    """Each step: 2 s of training, 0.75 s of nothing; its samples were there for so long when they were read."""
    found = prepare(write_run(home, "stale", merged(GRPO, APART, STALE)), (), None)
    run = Planned("stale", found.request, found.job.plan)
    observer = CostsFile(run, tmp_path / COSTS_FILE)
    metrics = steps([1.0])[0].metrics | {"train/queue_seconds": queue_seconds}
    done = [StepRecord(number, 2.75, metrics, 0.0, (2, 3, 4)) for number in range(9)]
    for record in done:
        at = 2.75 * record.step
        observer.observe(Span(1, "rollout", record.step, at - 2.0, at))
        observer.observe(Span(0, "train", record.step, at, at + 2.0))
        observer.observe(record)
    observer.observe(RunEnded(9, "finished", True))
    table = load_costs(tmp_path)
    again = reprice(replace(with_lengths(run.request, done), costs=table), run.plan)
    assert again.allocations["train"].seconds - again.allocations["train"].step_end_seconds == pytest.approx(2.0)
    if of == "training":
        assert table.step_end_seconds == pytest.approx(0.75)
        assert again.period_seconds == pytest.approx(2.75, rel=1e-3)
        assert [call.call for call in table.calls] == ["train"]
    else:
        assert table.step_end_seconds is None
        assert {call.call: call.seconds for call in table.calls} == pytest.approx({"train": 2.0, "rollout": 2.75})
        assert again.allocations["rollout"].seconds == pytest.approx(2.75, rel=0.01)
        assert again.period_seconds == pytest.approx(2.75, rel=0.01)


@pytest.mark.parametrize("n", [1, 7, 511, 513, 514, 515, 5_000, 40_000])
def test_a_long_run_holds_no_more_steps_than_a_short_one(n: int) -> None:
    """Steps are left out evenly."""
    some, record = SomeSteps(), steps([1.0])[0]
    for step in range(n):
        some.add(replace(record, step=step))
    kept = [record.step for record in some.records]
    assert kept[:2] == [0, 1][:n]
    assert kept[2:] == list(range(2, n, some.every))
    assert len(kept) < MOST_STEPS + 2
    assert n <= MOST_STEPS + 1 or len(kept) >= MOST_STEPS // 2


def test_the_table_of_a_long_run_says_how_much_was_measured(home: Path, tmp_path: Path) -> None:
    observer = CostsFile(planned(home), tmp_path / COSTS_FILE)
    tracemalloc.start()
    before = 0
    for number in range(6_000):
        observer.observe(steps([9.0 if number < 2 else 1.0 + number % 2])[0])
        if number == 1_000:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000
    observer.observe(RunEnded(6_000, "finished", True))
    (call, *_) = load_costs(tmp_path).calls
    assert call.count == pytest.approx(6_000, rel=0.01)
    assert 1.0 <= call.seconds <= 2.0


def test_the_file_is_written_when_the_run_ends_in_whatever_way(home: Path, tmp_path: Path) -> None:
    observer = CostsFile(planned(home), tmp_path / COSTS_FILE)
    for step in steps([1.0] * 4):
        observer.observe(step)
    assert not (tmp_path / COSTS_FILE).exists()
    observer.observe(RunEnded(4, "worker 1 was killed by SIGKILL", False))
    assert load_costs(tmp_path).calls
    observer.close()


def test_a_resumed_run_adds_to_its_table(home: Path, tmp_path: Path) -> None:
    def go_on(first: int, seconds: list[float]) -> None:
        observer = CostsFile(planned(home), tmp_path / COSTS_FILE)
        observer.observe(RunStarted("planned", "grpo", 9, first, str(tmp_path), ()))
        for step in steps(seconds):
            observer.observe(step)
        observer.observe(RunEnded(first + len(seconds), "stopped", True))

    go_on(0, [9.0, 1.0, 1.0])
    go_on(3, [9.0, 4.0, 4.0])
    assert [call.count for call in load_costs(tmp_path).calls] == [4, 4]
    assert [call.seconds for call in load_costs(tmp_path).calls] == pytest.approx([2.0, 4.0])
    go_on(6, [9.0])
    assert [call.count for call in load_costs(tmp_path).calls] == [4, 4]
    (tmp_path / COSTS_FILE).write_text('{"format": 0}')
    go_on(6, [9.0, 4.0])
    assert [call.count for call in load_costs(tmp_path).calls] == [1, 1]


# --- profile ----------------------------------------------------------------------------------------------------------


def test_a_profile_measures_all_kinds_of_cases_on_all_devices() -> None:
    cases = (
        Gemm(64, 64),
        DeviceCopy(1 << 20),
        Collective("allreduce", 4096, 2),
        Collective("gather", 4096, 2),
        Collective("scatter", 4096, 2),
        Collective("exchange", 4096, 2),
        Collective("p2p", 4096, 2),
        Pass(SMALL, 4, 8),
        Pass(SMALL, 8, 8),
        Pass(SMALL, 8, 8, 2, True),
        DecodeCase(SMALL, 4, 16),
        RolloutCase(SMALL, 2, 4, 8, 4, 4),
    )
    measured = apart(measure, ProfileTask(cases, NODE, "float32", rounds=2))
    assert tuple(one.case for one in measured) == cases
    assert all(one.seconds > 0 and one.spread >= 0 and one.count == 2 for one in measured)
    found = profiled(measured, NODE, "float32")
    for one in measured:
        assert predicted_seconds(one.case, NODE, "float32", found.costs) > 0
    products = next(stage for stage in found.stages if stage.name == "matrix products")
    assert products.count == 1  # how near the formulas come is tested on made-up seconds, which no other work changes


def test_a_worker_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(ConfigError) as raised:
        apart(measure, ProfileTask((HostLink(1024, True),), replace(NODE, devices_per_node=1), "float32", rounds=1))
    text = str(raised.value.problems[0])
    assert "worker 0 ended with exit code 1" in text
    assert "Error" in text


def test_mistakes_are_told_before_anything_is_measured(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(asked: ProfileRequest, out: Path) -> str:
        with pytest.raises(ConfigError) as raised:
            profile_command(asked, out)
        return str(raised.value.problems[0])

    assert "there is no directory" in told(ProfileRequest(devices=1), tmp_path / "none" / "costs.json")
    assert "it is a directory" in told(ProfileRequest(devices=1), tmp_path)
    assert "need a run file" in told(ProfileRequest(overrides=("steps=1",)), tmp_path / "costs.json")
    file = write_run(home, "big", GRPO, {"cluster": {"kind": "H100-SXM", "devices": 64}})
    assert "this machine has" in told(ProfileRequest(file), tmp_path / "costs.json")
    many = write_run(home, "many", GRPO, {"cluster": {"kind": "cpu", "devices": 9}})
    few = Probe(cores=2, host_memory_bytes=8_000_000_000)
    for machine, says in ((few, "64 processes; 2 cores"), (replace(few, gpus=(H100,) * 2), "this machine has 2 GPUs")):
        for module in ("realgraph.profile.command", "realgraph.run.requests"):
            monkeypatch.setattr(f"{module}.probe", lambda machine=machine: machine)
        assert says in told(ProfileRequest(devices=64), tmp_path / "costs.json")
        assert "9 processes" in told(ProfileRequest(many), tmp_path / "costs.json")
        assert machine_of(ProfileRequest(many, devices=8))[0].devices_per_node == 8
    assert machine_of(ProfileRequest(devices=2))[0].kind == "H100-SXM"
    result = CliRunner().invoke(app, ["profile", "--help"])
    assert result.exit_code == 0
    assert "--out" in result.output


def test_an_empty_table_is_no_measurement() -> None:
    assert CostTable().factors is None
    assert CostTable().calls == ()


@pytest.mark.parametrize(
    ("seconds", "falls"),
    [([1.0], False), ([1.0, 1.0, 1.0], False), ([2.0, 1.0, 1.0, 1.0], True), ([1.0, 2.0, 2.0, 0.97], False)],
)
def test_rounds_go_on_while_the_least_seconds_fall(seconds: list[float], falls: bool) -> None:
    assert still_falls(seconds) is falls
    assert not still_falls([*seconds, 2.0, 2.0, 2.0])
