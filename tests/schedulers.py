"""Copies of Schedulers, for tests."""

import msgspec

from realgraph.runtime.scheduler.scheduler import Scheduler
from tests.simulated_rollouts import N_EVAL_ROWS


def copied(scheduler: Scheduler) -> Scheduler:
    """Another Scheduler of the same run, by its image as bytes, which stays the same."""
    copy = Scheduler(scheduler._job, scheduler._workers, 1000, None, N_EVAL_ROWS)
    image = msgspec.msgpack.encode(scheduler.image)
    copy.restore(msgspec.msgpack.decode(image, type=type(scheduler.image)))
    assert msgspec.msgpack.encode(copy.image) == image
    return copy
