"""Copies of Schedulers, for tests."""

import msgspec

from realgraph.runtime.scheduler.scheduler import Scheduler
from tests.shapes import Shape, job_of


def copied(scheduler: Scheduler, shape: Shape) -> Scheduler:
    """Another Scheduler of the same run, by its image as bytes, which stays the same."""
    copy = Scheduler(job_of(shape), range(shape.n_workers), 1000, None, 5)
    image = msgspec.msgpack.encode(scheduler.image)
    copy.restore(msgspec.msgpack.decode(image, type=type(scheduler.image)))
    assert msgspec.msgpack.encode(copy.image) == image
    return copy
