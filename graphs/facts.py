"""Facts about a run, its data and its sizes, that rules may use. A default means "unknown"."""

from msgspec import Struct, field


class Facts(Struct, frozen=True):
    """Facts about the run around a graph; a rule that needs an unknown fact stays silent."""

    data_columns: dict[str, str] = field(default_factory=dict)  # graph input -> data column, as the user maps them
    columns: tuple[str, ...] | None = None  # that the data set has
    n_rows: int | None = None  # of the data set, after its limit
    groups: int | None = None  # prompt groups a step
    surplus: int = 0  # groups begun beyond them
    steps: int | None = None  # of the run
    staleness: int = 0
    max_new_tokens: int | None = None  # of the run
