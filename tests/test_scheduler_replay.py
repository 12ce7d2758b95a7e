"""Logs of events: random runs replay to their very commands, from the start or from the middle; damage is named."""

import random
from pathlib import Path

import msgspec
import pytest

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten, Event, StopRequested, WorkerLost
from realgraph.runtime.job.rotation import older
from realgraph.runtime.master.event_log import HEAD, DamagedLog, Diverged, EventLog, LogStart, Replay, Replayed
from realgraph.runtime.scheduler.image import SchedulerImage
from realgraph.runtime.scheduler.scheduler import Scheduler
from realgraph.runtime.wire.protocol import Done, Heartbeat
from tests.replays import LoggedScheduler, replayed
from tests.shapes import Shape, job_of, random_shape
from tests.simulator import Simulator

HUGE = 10**9  # bytes: nothing is ever dropped


def logged(
    path: Path, shape: Shape, rng: random.Random, most_bytes: int = HUGE, state: Checkpointed | None = None
) -> tuple[Simulator, LoggedScheduler]:
    scheduler = LoggedScheduler(path, most_bytes, job_of(shape), range(shape.n_workers), state)
    return Simulator(shape, rng, scheduler), scheduler


@pytest.mark.parametrize("seed", range(100))
def test_a_run_replays_to_the_same_commands_whatever_its_end(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    shape, path = random_shape(rng), tmp_path / "events.log"
    simulator, scheduler = logged(path, shape, rng)
    simulator.run(max_events=rng.choice([rng.randint(1, 200), 10**9]))
    if simulator.halt is None and rng.random() < 0.5:
        last: list[Event] = [StopRequested(), WorkerLost(0, "gone"), Done(0, 10**6, "train")]
        simulator.feed(rng.choice(last))
    scheduler.log.close()
    replay, events = replayed(path)
    assert [(one.event, one.now, one.actions) for one in events] == scheduler.answers
    assert replay.scheduler.deadline() == scheduler.deadline()
    assert replay.start.n_before == 0
    if simulator.halt is None:
        assert replay.scheduler.image == scheduler.image


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_log_that_has_dropped_its_beginning_replays_the_rest(seed: int, tmp_path: Path) -> None:
    """Logs begin in the middle of whatever is under way: sessions, evaluations, stale groups, steps side by side."""
    rng = random.Random(seed)
    shape, path = random_shape(rng), tmp_path / "events.log"
    shape.steps, shape.checkpoint_every, most_bytes = 5, rng.choice([0, 2]), rng.choice([2_000, 20_000])
    former = Simulator(shape, rng)
    former.run()
    states = [action.state for action in former.actions if isinstance(action, CheckpointWritten)]
    simulator, scheduler = logged(path, shape, rng, most_bytes, states[0] if len(states) > 1 else None)
    simulator.run()
    scheduler.log.close()
    n_before, events = 0, list[Replayed]()
    for file in (older(path), path):
        if file.exists():
            replay, events = replayed(file)
            n_before = replay.start.n_before
            assert (replay.start.image is None) == (n_before == 0)
            part = scheduler.answers[n_before : n_before + len(events)]
            assert [(one.event, one.now, one.actions) for one in events] == part
            replay.scheduler.check()
    assert n_before + len(events) == len(scheduler.answers)
    assert events[-1].actions[-1] == simulator.halt
    assert {file.name for file in tmp_path.iterdir()} <= {"events.log", "events.1.log"}
    if len(scheduler.answers) > 300:
        assert n_before > 0


@pytest.mark.parametrize("seed", range(100))
def test_a_scheduler_restored_from_an_image_acts_like_the_one_it_was_taken_of(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    simulator = Simulator(shape, rng)
    simulator.run(max_events=rng.randint(1, 120))
    if simulator.halt is not None:
        return
    content = msgspec.msgpack.encode(simulator.scheduler.image)
    image = msgspec.msgpack.decode(content, type=SchedulerImage)
    other = Scheduler(job_of(shape), range(shape.n_workers), 1000, None, 5)
    other.restore(image)
    assert msgspec.msgpack.encode(other.image) == content
    while simulator.halt is None:
        other.check()
        n_actions, planned = len(simulator.actions), min(simulator.events, default=None)
        assert other.deadline() == simulator.scheduler.deadline()
        assert planned is not None
        simulator.advance()
        assert other.on(planned.event, simulator.now) == simulator.actions[n_actions:]


@pytest.mark.parametrize("seed", range(40))
def test_a_resumed_run_logs_from_its_checkpoint_on_and_keeps_the_log_of_its_former_life(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    shape, path = random_shape(rng), tmp_path / "events.log"
    shape.checkpoint_every, shape.steps = 1, 3
    simulator, scheduler = logged(path, shape, rng)
    while not (written := [a.state for a in simulator.actions if isinstance(a, CheckpointWritten)]):
        simulator.run(max_events=simulator.n_events + 1)
    scheduler.log.close()
    later, resumed = logged(path, shape, rng, state=written[0])
    later.run()
    resumed.log.close()
    replay, events = replayed(path)
    assert replay.start.first == written[0]
    assert [(one.event, one.now, one.actions) for one in events] == resumed.answers
    _, former = replayed(older(path))
    assert [one.actions for one in former] == [actions for _, _, actions in scheduler.answers]


def a_log(path: Path) -> bytes:
    simulator, scheduler = logged(path, Shape(), random.Random(0))
    simulator.run()
    scheduler.log.close()
    return path.read_bytes()


def test_what_leaves_the_scheduler_as_it_is_is_not_logged_and_samples_are_not(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    simulator, scheduler = logged(path, Shape(), random.Random(0))
    simulator.run(max_events=10)
    n_bytes = len(path.read_bytes())
    for _ in range(1000):
        simulator.feed(Heartbeat(0))
    task = next(task for task in scheduler._tasks.flying.values())
    simulator.feed(Done(min(task.waiting), task.number, task.call, transcripts=("a secret sample",)))
    scheduler.log.close()
    assert len(path.read_bytes()) < n_bytes + 20_000
    assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("seed", range(60))
def test_any_changed_byte_is_named_with_its_record(seed: int, tmp_path: Path) -> None:
    path, rng = tmp_path / "events.log", random.Random(seed)
    content = bytearray(a_log(path))
    at = rng.randrange(len(content))
    starts = [0]
    while starts[-1] < len(content):
        starts.append(starts[-1] + HEAD.size + HEAD.unpack_from(content, starts[-1])[0])
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    number = next(i for i, start in enumerate(starts) if start > at)
    with pytest.raises(DamagedLog, match=rf"record {number} \(byte {starts[number - 1]:,}\)"):
        replayed(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_log_that_was_cut_off_replays_up_to_there(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    content = a_log(path)
    _, whole = replayed(path)
    first = HEAD.size + HEAD.unpack_from(content, 0)[0]
    path.write_bytes(content[: random.Random(seed).randrange(first, len(content))])
    _, events = replayed(path)
    assert [one.actions for one in events] == [one.actions for one in whole][: len(events)]
    path.write_bytes(content[: first - 1])
    with pytest.raises(DamagedLog, match="not there as a whole"):
        Replay(path)


def test_a_replay_that_gives_other_commands_is_named(tmp_path: Path) -> None:
    """The log of a job with other deadlines stands for a changed Scheduler."""
    path, shape = tmp_path / "events.log", Shape(steps=2)
    job = job_of(shape)
    simulator, scheduler = logged(path, shape, random.Random(0))
    other = msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, min_deadline_seconds=7.0))
    scheduler.log = EventLog(path, HUGE, LogStart(msgspec.json.encode(other), (0, 1), 1000, 5, None))
    simulator.run()
    scheduler.log.close()
    with pytest.raises(Diverged, match=r"the commands before record \d+ \(byte [\d,]+\) are not those"):
        replayed(path)
