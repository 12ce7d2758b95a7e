"""The compiled graph: what the checker hands to the planner and the runtime. Correct by construction; plain data."""

from collections.abc import Container
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from realgraph.graphs.keys import DATA, KeyType
from realgraph.graphs.spec import Function, Generate, ModelCall, ModelRole, Train, role_of

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


class Graph(Struct, frozen=True, dict=True):  # dict: for what is cached
    """A checked algorithm; what `when` switched off is gone."""

    name: str
    calls: dict[str, ModelCall]  # in a topological order
    models: dict[str, ModelRole]  # by role
    keys: dict[str, Key]
    reads: dict[str, tuple[str, ...]]  # call -> every key, those inferred from losses and advantage steps included
    writes: dict[str, tuple[str, ...]]  # call -> every key, inferred ones included
    edges: tuple[Edge, ...]
    samples_per_group: int
    leading: str = ""  # of several generate calls, the one that makes the samples of a group; else ''
    # call -> the generate call, of several, on whose samples it works; DATA for sequences of the data beside samples
    samplers: dict[str, str] = field(default_factory=dict)
    least_samples: int = 1  # of a group that goes on, where a function leaves samples out (`keep: sample bool`)

    @cached_property
    def inputs(self) -> tuple[Key, ...]:
        """The keys that the data set gives."""
        return tuple(key for key in self.keys.values() if key.producer == INPUT)

    @cached_property
    def generates(self) -> tuple[str, ...]:
        """The generate calls, the one that makes the samples of a group first."""
        names = [name for name, call in self.calls.items() if isinstance(call, Generate)]
        return tuple(sorted(names, key=lambda name: name != self.leading))

    @cached_property
    def prompted(self) -> tuple[str, ...]:
        """The generate calls whose prompts other calls write."""
        calls = [(name, call) for name, call in self.calls.items() if isinstance(call, Generate)]
        return tuple(name for name, call in calls if self.keys[call.reads[0]].producer != INPUT)

    @cached_property
    def mesh_calls(self) -> tuple[str, ...]:
        """The calls that hold a mesh, in topological order; the others (functions, advantages) are free."""
        return tuple(name for name in self.calls if self.role(name))

    @cached_property
    def last_call(self) -> str:
        """The call with which a step ends: the last that trains what generates, else the last that trains, else the
        last that holds a mesh; '' where none does."""
        roles = {self.role(name) for name in self.generates}
        trains = [name for name in self.mesh_calls if isinstance(self.calls[name], Train)]
        trained = [name for name in trains if self.role(name) in roles]
        return next(reversed(trained or trains or self.mesh_calls), "")

    @cached_property
    def sample_functions(self) -> tuple[str, ...]:
        """The functions of one sample that need nothing but it and its data: they may run before its group is whole."""
        given = {INPUT, *self.generates[:1]}
        functions = [name for name, call in self.calls.items() if isinstance(call, Function) and call.over == "sample"]
        return tuple(name for name in functions if self.generates and given.issuperset(self.producers(name)))

    def of_calls(self, kept: Container[str]) -> "Graph":
        """The graph of these calls alone; what they read of others, they are not given."""
        calls = {name: call for name, call in self.calls.items() if name in kept}
        readers = {name: tuple(one for one in key.consumers if one in calls) for name, key in self.keys.items()}
        keys = {
            name: replace(key, consumers=readers[name])
            for name, key in self.keys.items()
            if key.producer in calls or (key.producer == INPUT and readers[name])
        }
        return replace(
            self,
            calls=calls,
            keys=keys,
            reads={name: self.reads[name] for name in calls},
            writes={name: self.writes[name] for name in calls},
            edges=tuple(edge for edge in self.edges if edge.producer in calls and edge.consumer in calls),
            samplers={name: sampler for name, sampler in self.samplers.items() if name in calls},
        )

    def producers(self, call: str) -> tuple[str, ...]:
        """Those that write what `call` reads, `INPUT` for the data set, in the order in which it reads them. Keys that
        are made inside the call itself have none."""
        read = [self.keys[key].producer for key in self.reads[call] if key in self.keys]
        return tuple(dict.fromkeys(read))

    def sampler(self, call: str) -> str:
        """The generate call on whose samples a train, inference or advantage call works; '' for those of the data where
        nothing generates, DATA for sequences of the data beside generated samples."""
        return self.samplers.get(call) or next(iter(self.generates), "")

    def works_on_data(self, call: str) -> bool:
        """True where `call` works on one sequence of the data a group, beside generated samples."""
        return self.samplers.get(call) == DATA and DATA not in self.generates

    def plain(self, call: str, key: str) -> str:
        """The name under which losses and advantages know a key that `call` reads: without the name of its sampler."""
        return key.removeprefix(f"{self.samplers[call]}.") if call in self.samplers else key

    def role(self, call: str) -> str:
        """The role that `call` runs, '' for functions and advantages."""
        return self._roles[call]

    @cached_property
    def _roles(self) -> dict[str, str]:
        return {name: role_of(call) for name, call in self.calls.items()}
