"""The compiled graph: what the checker hands to the planner and the runtime. Correct by construction; plain data."""

from msgspec import Struct

from realgraph.graphs.keys import KeyType
from realgraph.graphs.spec import ModelCall, ModelRole, role_of

INPUT = ""  # the producer of an input key: the data set


class Key(Struct, frozen=True):
    """A typed key, the call that writes it (`INPUT` for the data set) and those that read it."""

    name: str
    type: KeyType
    producer: str
    consumers: tuple[str, ...] = ()


class Edge(Struct, frozen=True):
    """A value that flows from call to call: `consumer` of step k reads what `producer` wrote in step k - `distance`."""

    producer: str
    consumer: str
    keys: tuple[str, ...] = ()  # of data; none where weights flow
    role: str = ""  # whose weights flow; empty for data
    distance: int = 0  # steps


class Graph(Struct, frozen=True):
    """A checked algorithm; what `when` switched off is gone."""

    name: str
    calls: dict[str, ModelCall]  # in a topological order
    models: dict[str, ModelRole]  # by role
    keys: dict[str, Key]
    reads: dict[str, tuple[str, ...]]  # call -> every key, those inferred from losses and advantage steps included
    writes: dict[str, tuple[str, ...]]  # call -> every key, inferred ones included
    edges: tuple[Edge, ...]
    samples_per_group: int

    @property
    def inputs(self) -> tuple[Key, ...]:
        """The keys that the data set gives."""
        return tuple(key for key in self.keys.values() if key.producer == INPUT)

    def role(self, call: str) -> str:
        """The role that `call` runs, '' for functions and advantages."""
        return role_of(self.calls[call])
