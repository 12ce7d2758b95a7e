"""Keys that each call reads and writes, with types: declared ones and those its loss or steps imply. Judges nothing."""

from collections.abc import Callable, Iterator
from typing import TypeGuard, TypeVar

from msgspec import Struct

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.graph import INPUT
from realgraph.graphs.keys import (
    ANY_TYPE,
    BEHAVIOUR_LOGPROBS,
    GENERATED,
    MASK,
    MASK_TYPE,
    OWN_TOKENS,
    PROMPT_TYPE,
    REWARD_TYPE,
    ROUTES,
    ROUTES_KEY,
    ROUTES_TYPE,
    SEQUENCE_TYPE,
    TENSOR_TYPE,
    TOKENS,
    VERSIONS,
    VERSIONS_TYPE,
    KeyType,
    LogprobSemantics,
    Meaning,
    Requirement,
    own_tokens,
    parse_key_type,
)
from realgraph.graphs.maths import (
    Term,
)
from realgraph.graphs.spec import Advantage, Function, Generate, GraphSpec, Inference, ModelCall, Train
from realgraph.graphs.steps import Step

RETURNS = "returns"


class Read(Struct, frozen=True):
    """A key that something in the graph reads."""

    key: str
    path: str  # of what reads it, in YAML
    by: str  # the reader in words
    requires: Requirement


class Write(Struct, frozen=True):
    """A key that a call or the data set writes."""

    key: str
    path: str  # of what writes it, in YAML
    call: str  # `INPUT` for the data set
    type: KeyType | None  # None where the user's text could not be read
    meaning: Meaning = ""


class Lost(Struct, frozen=True):
    """A key that nothing writes any more, since its call is switched off."""

    call: str  # the only one that would write it
    switch: str  # YAML path of the `when`


C = TypeVar("C", Generate, Inference, Function, Advantage, Train)


class Draft(Struct, frozen=True):
    """A graph under examination: what `when` switched off is gone, nothing else is known to be right."""

    spec: GraphSpec
    where: Callable[[str], Where]  # YAML path -> its place in a file
    reads: dict[str, tuple[Read, ...]]  # of each call
    writes: dict[str, tuple[Write, ...]]  # of each key, inputs first
    switched_off: dict[str, Lost]  # keys that only switched-off calls would write
    samples_per_group: int

    def of(self, kind: type[C]) -> Iterator[tuple[str, C]]:
        """The calls of one kind with their names."""
        return ((name, call) for name, call in self.spec.calls.items() if isinstance(call, kind))

    def problem(self, path: str, text: str, hint: str = "") -> Problem:
        return Problem(self.where(path), text, hint)

    def semantics(self, key: str) -> LogprobSemantics | None:
        """The meaning of the log-probabilities under `key`, None where unknown or no log-probabilities."""
        for write in self.writes.get(key, ()):
            return write.type.logprobs if write.type else None
        return None

    def producer(self, key: str) -> str | None:
        """The first call that writes `key`, `INPUT` for the data set."""
        return next((write.call for write in self.writes.get(key, ())), None)


def infer(spec: GraphSpec, where: Callable[[str], Where], switched_off: dict[str, Lost]) -> Draft:
    """Collect reads and writes of all calls."""
    writes: dict[str, list[Write]] = {}
    inputs = (Write(key, f"$.inputs.{key}", INPUT, parse_type(text)) for key, text in spec.inputs.items())
    calls = (write for name, call in spec.calls.items() for write in call_writes(name, call))
    for write in (*inputs, *calls, *_own_writes(spec), *_route_writes(spec)):
        writes.setdefault(write.key, []).append(write)
    return Draft(
        spec=spec,
        where=where,
        reads={name: call_reads(name, call, spec) for name, call in spec.calls.items()},
        writes={key: tuple(of_key) for key, of_key in writes.items()},
        switched_off=switched_off,
        samples_per_group=samples_per_group(spec),
    )


def parse_type(text: str) -> KeyType | None:
    """The key type, None where the text is none (a rule of its own says so)."""
    try:
        return parse_key_type(text)
    except ValueError:
        return None


def samples_per_group(spec: GraphSpec) -> int:
    """The generate call's n; without one, 2 where a loss compares pairs, else 1."""
    for call in spec.calls.values():
        if isinstance(call, Generate):
            return call.n
    terms = (term for call in spec.calls.values() if isinstance(call, Train) for term in call.loss.terms.values())
    return 2 if any(term.of_pairs for term in terms) else 1


# --- writes -----------------------------------------------------------------------------------------------------------


def call_writes(name: str, call: ModelCall) -> tuple[Write, ...]:
    """The keys a call writes, with types."""
    path = f"$.calls.{name}"
    match call:
        case Generate():
            return tuple(
                Write(key, path, name, _behaviour(call) if key == BEHAVIOUR_LOGPROBS else key_type, _meaning(key))
                for key, key_type in GENERATED.items()
            )
        case Inference():
            return tuple(
                Write(key, f"{path}.writes[{i}]", name, _inferred_type(call), call.output)
                for i, key in enumerate(call.writes)
            )
        case Function():
            return tuple(Write(key, f"{path}.writes.{key}", name, parse_type(t)) for key, t in call.writes.items())
        case Advantage():
            keys = advantage_writes(call)
            of_token = KeyType("token", "float32")
            return tuple(Write(key, f"{path}.writes[{i}]", name, of_token, "advantages") for i, key in keys)
        case Train():
            return ()


def _own_writes(spec: GraphSpec) -> Iterator[Write]:
    """Keys that a generate call writes for roles that read its samples by their own tokenizer."""
    roles = dict.fromkeys(call.model for call in spec.calls.values() if is_own(call))
    generate = next((name for name, call in spec.calls.items() if isinstance(call, Generate)), None)
    if generate is not None:
        for role in roles:
            yield Write(own_tokens(role), f"$.calls.{generate}", generate, OWN_TOKENS)


def _route_writes(spec: GraphSpec) -> Iterator[Write]:
    """The key of experts that a generate call writes for calls of its role that replay them."""
    for name, call in spec.calls.items():
        if isinstance(call, Generate) and replays(spec, call.model):
            yield Write(ROUTES, f"$.calls.{name}", name, ROUTES_KEY)


def replays(spec: GraphSpec, role: str) -> bool:
    """True where calls of the role compute with the experts that a generate call of it has chosen."""
    sampled = any(isinstance(call, Generate) and call.model == role for call in spec.calls.values())
    return sampled and role in spec.models and spec.models[role].routing_replay


def is_own(call: ModelCall) -> TypeGuard[Inference]:
    """True where a call reads samples as its own tokenizer cuts them."""
    return isinstance(call, Inference) and call.tokenizer == "own"


def advantage_writes(call: Advantage) -> tuple[tuple[int, str], ...]:
    """Positions and names: the advantages, then the returns where a step makes them and no second name is given."""
    keys = tuple(enumerate(call.writes))
    return (*keys, (1, RETURNS)) if len(keys) == 1 and makes_returns(call) else keys


def makes_returns(call: Advantage) -> bool:
    return any(step is not None and step.makes_returns for step in call.steps.values())


def _meaning(key: str) -> Meaning:
    return "logprobs" if key == BEHAVIOUR_LOGPROBS else ""


def _behaviour(call: Generate) -> KeyType:
    truncated = call.top_p < 1 or call.top_k > 0
    return KeyType("token", "float32", LogprobSemantics(call.model, call.temperature, True, truncated))


def _inferred_type(call: Inference) -> KeyType:
    match call.output:
        case "logprobs":
            return KeyType("token", "float32", LogprobSemantics(call.model, call.temperature))
        case "values":
            return KeyType("token", "float32")
        case "scores":
            return KeyType("sample", "float32")


# --- reads ------------------------------------------------------------------------------------------------------------


def call_reads(name: str, call: ModelCall, spec: GraphSpec) -> tuple[Read, ...]:
    """The keys a call reads: declared ones first, then those its maths implies; each once for each type required."""
    path = f"$.calls.{name}"
    match call:
        case Generate():
            reads = _declared(name, call.reads, PROMPT_TYPE)
        case Inference(model=model, reads=keys):
            own = is_own(call) and any(isinstance(other, Generate) for other in spec.calls.values())
            keys = tuple(own_tokens(model) if own and key == TOKENS else key for key in keys)
            reads = _declared(name, keys, SEQUENCE_TYPE)
        case Function():
            reads = _declared(name, call.reads, ANY_TYPE)
        case Advantage():
            reward, others = call.reads[:1], call.reads[1:]
            reads = [
                *_declared(name, reward, REWARD_TYPE),
                *_declared(name, others, TENSOR_TYPE, first=1),
                *_sequence_reads(name),
                *(
                    read
                    for entry, step in call.steps.items()
                    if step
                    for read in step_reads(f"{path}.steps", entry, step)
                ),
            ]
        case Train():
            terms = f"{path}.loss.terms"
            reads = [
                *_sequence_reads(name),
                *(read for entry, term in call.loss.terms.items() for read in term_reads(terms, entry, term)),
            ]
            if any(isinstance(other, Generate) for other in spec.calls.values()):
                reads.append(Read(VERSIONS, path, f"the call {name!r}", VERSIONS_TYPE))
    if isinstance(call, Inference | Train) and replays(spec, call.model):
        reads.append(Read(ROUTES, path, f"the call {name!r}", ROUTES_TYPE))
    first: dict[tuple[str, Requirement], Read] = {}
    for read in reads:
        first.setdefault((read.key, read.requires), read)
    return tuple(first.values())


def _entry_reads(parent: str, entry: str, value: Step | Term, by: str) -> list[Read]:
    """Keys that an entry of a pipeline needs beside what its call reads. by: the entry in words."""
    path = f"{parent}.{entry}"
    return [
        Read(read.key, f"{path}.{read.field}" if read.field else path, by, read.requires) for read in value.key_reads
    ]


def step_reads(parent: str, entry: str, step: Step) -> list[Read]:
    """Keys that one advantage step needs beside the running reward."""
    return _entry_reads(parent, entry, step, f"the step {entry!r}")


def term_reads(parent: str, entry: str, term: Term) -> list[Read]:
    """Keys that one loss term needs beside tokens and mask."""
    return _entry_reads(parent, entry, term, f"the term {entry!r}")


def _declared(name: str, keys: tuple[str, ...], requires: Requirement, first: int = 0) -> list[Read]:
    by = f"the call {name!r}"
    return [Read(key, f"$.calls.{name}.reads[{i}]", by, requires) for i, key in enumerate(keys, first)]


def _sequence_reads(name: str) -> list[Read]:
    by = f"the call {name!r}"
    return [Read(TOKENS, f"$.calls.{name}", by, SEQUENCE_TYPE), Read(MASK, f"$.calls.{name}", by, MASK_TYPE)]
