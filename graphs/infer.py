"""Keys that each call reads and writes, with types: declared ones and those its loss or steps imply. Judges nothing."""

from collections.abc import Callable, Collection, Iterator
from typing import TypeGuard, TypeVar

from msgspec import Struct, structs

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.graph import INPUT
from realgraph.graphs.keys import (
    ANY_TYPE,
    BEHAVIOUR_LOGPROBS,
    DATA,
    DATA_MASK_TYPE,
    DATA_SEQUENCE_TYPE,
    GENERATED,
    GENERATED_OF_GROUP,
    LATER_PROMPT_TYPE,
    MASK,
    MASK_TYPE,
    OF_DATA,
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
from realgraph.graphs.spec import (
    Advantage,
    Function,
    Generate,
    GraphSpec,
    Inference,
    ModelCall,
    Train,
    generate_calls,
    generated_key,
    generated_level,
    leading_call,
    samples_of_role,
    works_on_data,
)
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
    leading: str  # the generate call that makes the samples of a group; '' where nothing generates
    samplers: dict[str, str]  # train, inference or advantage call -> the generate call on whose samples it works

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
    calls = (write for name in spec.calls for write in call_writes(name, spec))
    for write in (*inputs, *_data_writes(spec), *calls, *_own_writes(spec), *_route_writes(spec)):
        writes.setdefault(write.key, []).append(write)
    return Draft(
        spec=spec,
        where=where,
        reads={name: call_reads(name, spec) for name in spec.calls},
        writes={key: tuple(of_key) for key, of_key in writes.items()},
        switched_off=switched_off,
        samples_per_group=samples_per_group(spec),
        leading=leading_call(spec),
        samplers=samplers(spec),
    )


def parse_type(text: str) -> KeyType | None:
    """The key type, None where the text is none (a rule of its own says so)."""
    try:
        return parse_key_type(text)
    except ValueError:
        return None


def samples_per_group(spec: GraphSpec) -> int:
    """The leading generate call's n; without one, 2 where a loss compares pairs, else 1."""
    calls = generate_calls(spec)
    if calls:
        return calls[leading_call(spec)].n
    terms = (term for call in spec.calls.values() if isinstance(call, Train) for term in call.loss.terms.values())
    return 2 if any(term.of_pairs for term in terms) else 1


# --- several generate calls -------------------------------------------------------------------------------------------


def samplers(spec: GraphSpec) -> dict[str, str]:
    """Train, inference or advantage call -> the generate call on whose samples it works; none without one.

    A train call works on those of its role, unless it says otherwise; others on those of the calls that read what they
    write, or else of the calls that write what they read, or else of the leading call.
    """
    calls, leading = generate_calls(spec), leading_call(spec)
    working = [n for n, call in spec.calls.items() if isinstance(call, Inference | Advantage | Train) and calls]
    found: dict[str, str] = {}
    for name in working:
        call = spec.calls[name]
        own = [other for other, generate in calls.items() if samples_of_role(call, generate)]
        if works_on_data(spec, call):
            found[name] = DATA
        elif isinstance(call, Inference | Advantage | Train) and call.samples in calls:
            found[name] = str(call.samples)
        elif own:
            found[name] = leading if leading in own else own[0]
    while len(calls) > 1 and (name := _settled(spec, working, found)):
        found[name] = _near(spec, name, found).pop()
    return {name: found.get(name, leading) for name in working}


def _settled(spec: GraphSpec, working: Collection[str], found: dict[str, str]) -> str:
    """A call whose neighbours all work on the samples of one generate call; '' where there is none."""
    return next((name for name in working if name not in found and len(_near(spec, name, found)) == 1), "")


def _near(spec: GraphSpec, name: str, found: dict[str, str]) -> set[str]:
    """The generate calls on whose samples those work that read what a call writes, or else write what it reads."""
    written, read = _named_writes(spec, name), _named_reads(spec.calls[name], name)
    after = {found[other] for other in found if written & _named_reads(spec.calls[other], other)}
    return after or {found[other] for other in found if read & _named_writes(spec, other)}


def _named_writes(spec: GraphSpec, name: str) -> set[str]:
    return {write.key for write in call_writes(name, spec)}


def _named_reads(call: ModelCall, name: str) -> set[str]:
    """The keys that a call's own fields name."""
    match call:
        case Advantage(reads=reads, steps=steps):
            entries = [read for entry, step in steps.items() if step for read in step_reads("", entry, step)]
        case Train(loss=loss):
            reads, entries = (), [r for entry, term in loss.terms.items() for r in term_reads("", entry, term)]
        case _:
            return set()
    return {*reads, *(read.key for read in entries)} - GENERATED.keys()


# --- writes -----------------------------------------------------------------------------------------------------------


def call_writes(name: str, spec: GraphSpec) -> tuple[Write, ...]:
    """The keys a call writes, with types."""
    path, call = f"$.calls.{name}", spec.calls[name]
    match call:
        case Generate():
            of_group = len(generate_calls(spec)) > 1 and generated_level(spec, name) == "group"
            types = GENERATED_OF_GROUP if of_group else GENERATED | {BEHAVIOUR_LOGPROBS: _behaviour(call)}
            return tuple(
                Write(generated_key(spec, name, key), path, name, key_type, _meaning(key))
                for key, key_type in types.items()
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


def _data_writes(spec: GraphSpec) -> Iterator[Write]:
    """The keys of the data's own sequences, where a call trains on them beside generated samples."""
    path = next((f"$.calls.{name}.samples" for name, call in spec.calls.items() if works_on_data(spec, call)), "")
    return (Write(key, path, INPUT, key_type) for key, key_type in OF_DATA.items() if path)


def _own_writes(spec: GraphSpec) -> Iterator[Write]:
    """Keys that a generate call writes for roles that read its samples by their own tokenizer."""
    roles = dict.fromkeys(call.model for call in spec.calls.values() if is_own(call))
    generate = leading_call(spec)
    if generate:
        for role in roles:
            yield Write(own_tokens(role), f"$.calls.{generate}", generate, OWN_TOKENS)


def _route_writes(spec: GraphSpec) -> Iterator[Write]:
    """The key of experts that a generate call writes for calls of its role that replay them."""
    for name, call in spec.calls.items():
        if isinstance(call, Generate) and replays(spec, call.model) and generated_level(spec, name) == "sample":
            yield Write(generated_key(spec, name, ROUTES), f"$.calls.{name}", name, ROUTES_KEY)


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


def call_reads(name: str, spec: GraphSpec) -> tuple[Read, ...]:
    """The keys a call reads: declared ones first, then those its maths implies; each once for each type required."""
    path, call, generates = f"$.calls.{name}", spec.calls[name], generate_calls(spec)
    match call:
        case Generate():
            reads = _declared(name, call.reads, PROMPT_TYPE if name == leading_call(spec) else LATER_PROMPT_TYPE)
        case Inference(model=model, reads=keys):
            own = is_own(call) and bool(generates)
            keys = tuple(own_tokens(model) if own and key == TOKENS else key for key in keys)
            reads = _declared(name, keys, SEQUENCE_TYPE)
        case Function():
            places = call.keywords if isinstance(call.reads, dict) else range(len(call.reads))
            by = f"the call {name!r}"
            field = ".{}" if isinstance(call.reads, dict) else "[{}]"
            reads = [
                Read(key, f"{path}.reads{field.format(place)}", by, ANY_TYPE)
                for place, key in zip(places, call.keywords.values(), strict=True)
            ]
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
            terms, of_data = f"{path}.loss.terms", works_on_data(spec, call)
            reads = [
                *(_data_reads(name) if of_data else _sequence_reads(name)),
                *(read for entry, term in call.loss.terms.items() for read in term_reads(terms, entry, term)),
            ]
            if generates and not of_data:
                reads.append(Read(VERSIONS, path, f"the call {name!r}", VERSIONS_TYPE))
    sampler = samplers(spec).get(name, "")
    sampled = generates[sampler].model if sampler in generates else ""
    if isinstance(call, Inference | Train) and call.model == sampled and replays(spec, sampled):
        reads.append(Read(ROUTES, path, f"the call {name!r}", ROUTES_TYPE))
    first: dict[tuple[str, Requirement], Read] = {}
    for read in reads:
        resolved = structs.replace(read, key=_resolved(spec, sampler, read.key))
        first.setdefault((resolved.key, resolved.requires), resolved)
    return tuple(first.values())


def _resolved(spec: GraphSpec, sampler: str, key: str) -> str:
    """The full name of a key that a call names: what its own sampler writes goes by its plain name, too; and where one
    call generates, `<call>.<key>` is `<key>`."""
    calls = generate_calls(spec)
    call, _, plain = key.partition(".")
    if len(calls) == 1:
        return plain if call in calls and plain in GENERATED else key
    return generated_key(spec, sampler, key) if sampler in calls and key in (*GENERATED, ROUTES) else key


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


def _data_reads(name: str) -> list[Read]:
    path, by, requires = f"$.calls.{name}", f"the call {name!r}", (DATA_SEQUENCE_TYPE, DATA_MASK_TYPE)
    return [Read(key, path, by, required) for key, required in zip(OF_DATA, requires, strict=True)]
