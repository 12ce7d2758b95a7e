"""The whole state of a Scheduler as plain data: a log of events whose beginning is gone starts from one.

A checkpoint's state is less: of a step boundary, with all that is in hand then left to be done again.
"""

from msgspec import Struct

from realgraph.runtime.commands.actions import Checkpointed
from realgraph.runtime.commands.tally import TallyImage
from realgraph.runtime.commands.tasks import TasksImage
from realgraph.runtime.scheduler.collection import CollectionImage
from realgraph.runtime.scheduler.devices import DevicesImage
from realgraph.runtime.scheduler.groups.ledger import LedgerImage
from realgraph.runtime.scheduler.held_out import HeldOutImage
from realgraph.runtime.scheduler.step_boundary import BoundaryImage
from realgraph.runtime.scheduler.steps import OpenStepsImage


class SchedulerImage(Struct, frozen=True):
    """A Scheduler between two events."""

    last_state: Checkpointed  # of the last step boundary
    ledger: LedgerImage
    tasks: TasksImage
    collection: CollectionImage
    steps: OpenStepsImage
    devices: DevicesImage
    boundary: BoundaryImage
    boundary_task: int | None  # the evaluation or checkpoint in hand
    held_out: HeldOutImage
    spoiled: bool  # an engine of the evaluation in hand is gone
    gone: tuple[int, ...]  # workers
    beside: int | None  # the evaluation that the run goes on beside
    n_discarded: int  # when the Scheduler last looked around after an answer
    tallies: tuple[TallyImage, ...]  # by their numbers
