"""The counters of a saved state, beside its tensors: `train_state.json`. Knows no engine."""

import msgspec
from msgspec import Struct

from realgraph.runtime.files.paths import RunPath

FORMAT = 1
STATE = "train_state.json"


class Counters(Struct, frozen=True, forbid_unknown_fields=True):
    """Counters that an engine has to remember besides tensors.

    optimizer_steps: that were taken. due_steps: with those that were not, as nothing had a part in their loss; None in
    states of former versions, which counted the first alone.
    """

    version: int = 0
    optimizer_steps: int = 0
    due_steps: int | None = None
    loss_scale: float = 1.0
    good_steps: int = 0
    gate_passed: bool = False
    format: int = FORMAT

    @property
    def schedule_steps(self) -> int:
        """Steps that the schedule of the learning rate has passed."""
        return self.optimizer_steps if self.due_steps is None else self.due_steps


def read_counters(folder: RunPath) -> Counters:
    """Those of the state in `folder`. Raises FileNotFoundError, or ValueError for one of another format."""
    counters = msgspec.json.decode((folder / STATE).read_bytes(), type=Counters)
    if counters.format != FORMAT:
        raise ValueError(f"{folder / STATE} has format {counters.format}, this version reads {FORMAT}")
    return counters
