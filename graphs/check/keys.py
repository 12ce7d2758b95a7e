"""Rules about keys: who writes them, who reads them, of which type. Each yields the mistakes of one kind."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import pairwise
from keyword import iskeyword

import networkx as nx

from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.functions import KEEP, KEEP_TYPES
from realgraph.graphs.graph import INPUT
from realgraph.graphs.infer import Draft, Read, Write, makes_returns
from realgraph.graphs.keys import DTYPES, GENERATED, LEVELS, OF_DATA, TOKENS, parse_key_type
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train


def plain_name(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Names have the form of Python's: overrides spell them in dotted paths, and functions get keys as keywords."""
    generated = {name for name, _ in draft.of(Generate)}
    named = ((key, writes) for key, writes in draft.writes.items() if key not in OF_DATA)
    keys = {w.path: key for key, writes in named for w in writes if w.call not in generated}
    for path, name in [*_entries(draft), *keys.items()]:
        if not name.isidentifier() or (path in keys and iskeyword(name)):
            hint = "use letters, digits and _, such as ref_logp"
            yield draft.problem(path, f"{name!r} can't be a name: it is not a Python identifier", hint)


def _entries(draft: Draft) -> Iterator[tuple[str, str]]:
    """Paths and names of calls, roles, steps and terms."""
    spec = draft.spec
    named: list[tuple[str, Iterable[str]]] = [("$.calls", spec.calls), ("$.models", spec.models)]
    named += [(f"$.calls.{name}.steps", call.steps) for name, call in draft.of(Advantage)]
    named += [(f"$.calls.{name}.loss.terms", call.loss.terms) for name, call in draft.of(Train)]
    named += [(f"$.calls.{n}.reads", call.reads) for n, call in draft.of(Function) if isinstance(call.reads, dict)]
    return ((f"{parent}.{name}", name) for parent, names in named for name in names)


def no_calls(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A graph without calls does nothing."""
    if not draft.spec.calls:
        yield draft.problem("$.calls", "the graph has no call left to run", "add a call, or check its `when` switches")


def key_type_text(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Types in `inputs` and in a function's `writes` are `<level> <dtype>`."""
    yield from _type_texts(draft, "$.inputs", draft.spec.inputs)
    for name, call in draft.of(Function):
        yield from _type_texts(draft, f"$.calls.{name}.writes", call.writes)


def _type_texts(draft: Draft, parent: str, texts: dict[str, str]) -> Iterator[Problem]:
    for key, text in texts.items():
        path = f"{parent}.{key}"
        try:
            parse_key_type(text)
        except ValueError as error:
            yield draft.problem(path, str(error), _type_hint(text))


def _type_hint(text: str) -> str:
    """The closest type, where the text has two words."""
    words = text.split()
    if len(words) != 2:
        return "for example: sample float32"
    close = [get_close_matches(word, known, 1, 0.5) for word, known in zip(words, (LEVELS, DTYPES), strict=True)]
    return f"did you mean '{' '.join(match for (match,) in close)}'?" if all(close) else ""


def missing_producer(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Every key that is read has a producer."""
    for call, reads in draft.reads.items():
        once = {read.key: read for read in reversed(reads)}
        for read in reads:
            if read.key not in draft.writes and once[read.key] is read:
                text = f"no call writes {read.key!r}, which {read.by} reads"
                yield draft.problem(read.path, text, _missing_hint(draft, call, read))


def _missing_hint(draft: Draft, call: str, read: Read) -> str:
    if read.key in draft.switched_off:
        lost = draft.switched_off[read.key]
        return f"the call {lost.call!r} would write it, but {lost.switch} switches it off"
    if read.key in GENERATED:
        full = [key for key in draft.writes if key.endswith(f".{read.key}")]
        several = f"several calls generate: name one of {', '.join(full)}"
        return several if full else "a generate call writes it, or an input of the data set may give it"
    meaning = read.requires.meaning
    if meaning and not get_close_matches(read.key, draft.writes, 1, 0.6):
        return f"add an inference call with `output: {meaning}` and `writes: [{read.key}]`"
    own = {write.key for writes in draft.writes.values() for write in writes if write.call == call}
    hint = suggest(read.key, draft.writes.keys() - own - (GENERATED.keys() - {"text", TOKENS}))
    if hint.startswith("did") or not isinstance(draft.spec.calls[call], Function):
        return hint
    column = f"a column of the data is an input: inputs: {{{read.key}: group text}}, or another type"
    return f"{column}; {hint}" if hint else column


def duplicate_producer(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Every key has one producer."""
    for key, writes in draft.writes.items():
        first_write, *others = writes
        for write in others:
            by = "the data set" if first_write.call == INPUT else f"the call {first_write.call!r}"
            hint = "rename one of the two, remove it, or switch it off by `when`"
            yield draft.problem(write.path, f"{key!r} is written twice: by {by} and by the call {write.call!r}", hint)


def cycle(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Within a step no call waits for itself."""
    graph = nx.DiGraph()
    for consumer, reads in draft.reads.items():
        for read in reads:
            producer = draft.producer(read.key)
            if producer is not None and producer != INPUT:
                graph.add_edge(producer, consumer, key=read.key)
    order = {name: i for i, name in enumerate(draft.spec.calls)}
    knots = (knot for knot in nx.strongly_connected_components(graph) if len(knot) > 1 or _selfish(graph, knot))
    for knot in sorted(knots, key=lambda names: min(order[name] for name in names)):
        start = min(knot, key=lambda name: order[name])
        ring = _ring(graph.subgraph(knot), start)
        keys = [f"{b!r} reads {graph.edges[a, b]['key']!r} of {a!r}" for a, b in pairwise(ring)]
        text = f"calls wait for each other: {' -> '.join(ring)}"
        yield draft.problem(f"$.calls.{start}", text, f"{'; '.join(keys)}: remove one of these reads")


def _selfish(graph: nx.DiGraph, knot: set[str]) -> bool:
    return any(graph.has_edge(name, name) for name in knot)


def _ring(knot: nx.DiGraph, start: str) -> list[str]:
    """A shortest cycle through `start`, first call repeated at the end."""
    if knot.has_edge(start, start):
        return [start, start]
    back = min((nx.shortest_path(knot, after, start) for after in sorted(knot.successors(start))), key=len)
    return [start, *back]


def key_type(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A reader gets the level and dtype it can use."""
    for reads in draft.reads.values():
        for read in reads:
            writes = draft.writes.get(read.key, ())
            key_type = writes[0].type if writes else None
            if key_type is not None and not read.requires.accepts(key_type):
                text = f"{read.key!r} is {key_type}, but {read.by} needs {read.requires}"
                yield draft.problem(read.path, text, _origin(draft, writes[0]))


def _origin(draft: Draft, write: Write) -> str:
    """The origin of a type, in words; where it is one sample a group, how there is one for each of its samples."""
    if write.call == INPUT:
        return f"its type is given at {write.path}"
    call, hint = draft.spec.calls[write.call], f"it is written by the call {write.call!r}"
    if not isinstance(call, Generate) or write.type is None or write.type.level != "group":
        return hint
    if any(draft.producer(key) != INPUT for key in call.reads):
        return f"{hint}, which makes one sample a group: read its text in a function `over: group`"
    leading, n = draft.leading, draft.samples_per_group
    several = f"`n: {n}`" if n > 1 else f"the `n` of {leading!r}, and that 2 or more"
    return f"{hint}, which makes one sample a group: give it {several}, and it makes one beside each of {leading!r}"


def key_meaning(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Log-probabilities are not taken for values, nor values for log-probabilities."""
    words = {
        "logprobs": "log-probabilities",
        "values": "a critic's values",
        "scores": "scores",
        "advantages": "advantages or returns",
    }
    for reads in draft.reads.values():
        for read in reads:
            writes = draft.writes.get(read.key, ())
            write = writes[0] if writes else None
            if write is None or write.type is None or not read.requires.accepts(write.type):
                continue
            if read.requires.meaning and write.meaning and write.meaning != read.requires.meaning:
                text = f"{read.key!r} holds {words[write.meaning]}, but {read.by} needs {words[read.requires.meaning]}"
                fitting = _of_meaning(draft, read.requires.meaning)
                known = f"keys that hold {words[read.requires.meaning]}: {', '.join(fitting)}" if fitting else ""
                hint = known or f"add an inference call with `output: {read.requires.meaning}`"
                yield draft.problem(read.path, text, hint)


def _of_meaning(draft: Draft, meaning: str) -> list[str]:
    return sorted(key for key, writes in draft.writes.items() if writes[0].meaning == meaning)


def late_prompt(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A later generate call of a group starts before the batch is made: its prompt is there by then."""
    for name, _ in draft.of(Generate):
        if not _in_time(draft, name):
            text = f"{name!r} generates before a batch is made, but {_late_because(draft, name)}"
            hint = "let its prompt be made of what the data, generate calls, and functions of a sample or group give"
            yield draft.problem(f"$.calls.{name}.reads", text, hint)


def keep_type(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """`keep` filters groups or samples, so it is one bool a group or a sample."""
    for write in draft.writes.get(KEEP, ()):
        if write.type is not None and str(write.type) not in KEEP_TYPES:
            text = f"{KEEP!r} decides which groups or samples stay: it is {' or '.join(KEEP_TYPES)}, not {write.type}"
            hint = f"write `{KEEP}: {KEEP_TYPES[0]}` or `{KEEP}: {KEEP_TYPES[1]}`, or give the key another name"
            yield draft.problem(write.path, text, hint)
        elif write.call == INPUT:
            text = f"{KEEP!r} of the data filters nothing: only what a function writes under that name does"
            yield draft.problem(write.path, text, "leave the rows out of the data, or give the key another name")
        elif not _in_time(draft, write.call):
            text = f"{KEEP!r} is decided before a batch is made, but {_late_because(draft, write.call)}"
            hint = "let it read what the data, the generate call, and functions of a sample or group give"
            yield draft.problem(write.path, text, hint)


def _in_time(draft: Draft, name: str) -> bool:
    """True where a call runs as soon as its samples are there: it generates, or is a function over less than the batch,
    and waits for nothing but such calls."""
    call = draft.spec.calls[name]
    if not isinstance(call, Function | Generate):
        return False
    early = isinstance(call, Generate) or call.over != "batch"
    return early and all(_in_time(draft, producer) for producer in _producers(draft, name))


def _producers(draft: Draft, name: str) -> list[str]:
    """The other calls that a call waits for; in a cycle, which a rule of its own refuses, none."""
    producers = {draft.producer(read.key) for read in draft.reads[name]} - {None, INPUT, name}
    return sorted(p for p in producers if p is not None and not _waits_for(draft, p, name))


def _waits_for(draft: Draft, start: str, target: str) -> bool:
    """True where `start` reads, over any number of calls, what `target` writes."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for read in draft.reads[todo.pop()]:
            producer = draft.producer(read.key)
            if producer == target:
                return True
            if producer not in (None, INPUT) and producer not in seen:
                seen.add(str(producer))
                todo.append(str(producer))
    return False


def _late_because(draft: Draft, name: str) -> str:
    call = draft.spec.calls[name]
    if isinstance(call, Function) and call.over == "batch":
        return f"{name!r} works over the batch"
    late = next(producer for producer in _producers(draft, name) if not _in_time(draft, producer))
    key = next(read.key for read in draft.reads[name] if draft.producer(read.key) == late)
    kept = isinstance(draft.spec.calls[late], Function | Generate)
    return f"{name!r} reads {key!r} of {late!r}, which {'waits for a batch' if kept else 'runs on a batch'}"


def input_shape(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Data rows are groups: other levels come only with the sample sequences of a graph that does not generate."""
    generates = any(True for _ in draft.of(Generate))
    for key in draft.spec.inputs:
        key_type = draft.writes[key][0].type
        if generates and key_type is not None and key_type.level in ("sample", "token"):
            text = f"the input {key!r} is {key_type}, but a data row is one group: its samples are generated later"
            yield draft.problem(f"$.inputs.{key}", text, f"write `{key}: group {key_type.dtype}`")


def call_shape(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Generate reads one prompt, inference reads `tokens` and writes one key, an advantage writes one or two."""
    for name, generate in draft.of(Generate):
        if len(generate.reads) != 1:
            text = f"a generate call reads one key, the prompt, not {len(generate.reads)}"
            yield draft.problem(f"$.calls.{name}.reads", text, "write `reads: [prompt]`")
        given = generate.max_prompt_tokens is not None
        if given and all(draft.producer(key) == INPUT for key in generate.reads):
            text = "the longest prompt of the data is the data's own setting"
            path = f"$.calls.{name}.max_prompt_tokens"
            yield draft.problem(path, text, "set data.max_prompt_tokens in the run file, and leave this out")
        if "" in generate.stop:
            text = "an empty text matches everywhere: every sample would end at once"
            yield draft.problem(f"$.calls.{name}.stop[{generate.stop.index('')}]", text, "remove it")
    for name, inference in draft.of(Inference):
        if inference.reads != (TOKENS,):
            text = f"an inference call reads {TOKENS!r}, prompt and response, and nothing else"
            yield draft.problem(f"$.calls.{name}.reads", text, f"write `reads: [{TOKENS}]`, or leave it out")
        if len(inference.writes) != 1:
            text = f"an inference call writes one key, its {inference.output}, not {len(inference.writes)}"
            yield draft.problem(f"$.calls.{name}.writes", text, f"write `writes: [{name}]`")
    for name, advantage in draft.of(Advantage):
        yield from _advantage_shape(draft, name, advantage)


def _advantage_shape(draft: Draft, name: str, call: Advantage) -> Iterator[Problem]:
    most = 2 if makes_returns(call) else 1
    if not 1 <= len(call.writes) <= most:
        allowed = "the advantages and the returns" if most == 2 else "one key, the advantages (no step makes returns)"
        yield draft.problem(f"$.calls.{name}.writes", f"this advantage call writes {allowed}, not {len(call.writes)}")
    if not call.reads:
        text = "an advantage call reads a reward"
        yield draft.problem(f"$.calls.{name}.reads", text, "write `reads: [reward]`")
