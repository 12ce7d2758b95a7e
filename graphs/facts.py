"""Facts about a run, its data and its sizes, that rules may use. A default means "unknown"."""

from msgspec import Struct, field


class Facts(Struct, frozen=True):
    """Facts about the run around a graph; a rule that needs an unknown fact stays silent.

    data_columns: graph input -> data column, as the user maps them. columns: those the data set has.
    groups: prompt groups a step. n_rows: rows of the data set, after its limit. max_new_tokens: the run's.
    """

    data_columns: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    n_rows: int | None = None
    groups: int | None = None
    steps: int | None = None
    staleness: int = 0
    max_new_tokens: int | None = None
