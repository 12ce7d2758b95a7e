"""The counters of a saved state, beside its tensors: `train_state.json`. Knows no engine."""

import msgspec
from msgspec import Struct

from realgraph.runtime.files.paths import RunPath

FORMAT = 1
STATE = "train_state.json"


class Counters(Struct, frozen=True, forbid_unknown_fields=True):
    """Counters that an engine has to remember besides tensors."""

    version: int = 0
    optimizer_steps: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    gate_passed: bool = False
    format: int = FORMAT


def read_counters(folder: RunPath) -> Counters:
    """Those of the state in `folder`. Raises FileNotFoundError, or ValueError for one of another format."""
    counters = msgspec.json.decode((folder / STATE).read_bytes(), type=Counters)
    if counters.format != FORMAT:
        raise ValueError(f"{folder / STATE} has format {counters.format}, this version reads {FORMAT}")
    return counters
