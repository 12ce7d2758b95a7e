"""Rules about graphs that generate more than once: which samples there are, and on which of them a call works."""

from collections.abc import Iterator

from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import INPUT
from realgraph.graphs.infer import Draft
from realgraph.graphs.keys import OF_DATA
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, Train, works_on_data


def leading_prompt(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The call that makes the samples of a group answers a prompt of the data: the group begins with it."""
    generates = dict(draft.of(Generate))
    if len(generates) < 2:
        return
    for key in generates[draft.leading].reads[:1]:
        if draft.producer(key) not in (None, INPUT):
            text = f"{draft.leading!r} makes the samples of a group, but its prompt is {key!r} of a call"
            hint = "let one of the generate calls read a prompt of the data (inputs, such as `prompt: group tokens`)"
            yield draft.problem(f"$.calls.{draft.leading}.reads[0]", text, hint)


def later_samples(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Beside the samples of the leading call, another makes one for each of them, or one for their group."""
    for name, call in draft.of(Generate):
        if name == draft.leading:
            continue
        per_group = draft.samples_per_group
        of_data = all(draft.producer(key) == INPUT for key in call.reads)
        allowed = (1, per_group) if of_data else (1,)
        if call.n not in allowed:
            text = f"{name!r} makes {call.n} samples a prompt beside the {per_group} a group of {draft.leading!r}"
            beside = f", or `n: {per_group}`: one beside each sample" if of_data and per_group > 1 else ""
            hint = f"write `n: 1`: one for each value of its prompt{beside}"
            yield draft.problem(f"$.calls.{name}.n", text, hint)


def unknown_samples(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """`samples` names a generate call; of a train call, it may be the data."""
    generates = [name for name, _ in draft.of(Generate)]
    for name, call in draft.spec.calls.items():
        if works_on_data(draft.spec, call):
            continue
        if isinstance(call, Inference | Advantage | Train) and call.samples not in (None, *generates):
            path = f"$.calls.{name}.samples"
            if generates:
                text = f"{call.samples!r} is no generate call"
                yield draft.problem(path, text, suggest(str(call.samples), generates))
            else:
                yield draft.problem(path, "no call generates: the samples are those of the data", "leave it out")


def ambiguous_samples(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A train call says on whose samples it works, where several calls sample its role."""
    for name, call in draft.of(Train):
        own = [other for other, generate in draft.of(Generate) if generate.model == call.model]
        if call.samples is None and len(own) > 1:
            text = f"{' and '.join(map(repr, own))} all sample {call.model!r}: {name!r} does not say which it trains on"
            yield draft.problem(f"$.calls.{name}", text, f"add `samples: {draft.leading}` to it, or another of them")


def data_sequences(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A call that trains on sequences of the data, one a row, reads nothing about samples; other calls nothing of
    them."""
    for name, call in draft.spec.calls.items():
        if not works_on_data(draft.spec, call):
            for read in draft.reads[name]:
                if read.key in OF_DATA and draft.producer(read.key) == INPUT:
                    text = f"{read.key!r} is of the sequences that the data give: only what trains on them reads it"
                    yield draft.problem(read.path, text, "read an input of the data instead")
            continue
        assert isinstance(call, Train)
        for read in {read.path: read for read in reversed(draft.reads[name])}.values():
            write = next(iter(draft.writes.get(read.key, ())), None)
            if write is not None and write.type is not None and write.type.level in ("sample", "token"):
                text = f"{name!r} trains on sequences of the data, but {read.key!r} is about generated samples"
                hint = "take terms that read no such key, such as `cross_entropy: {}`, or leave `samples` out"
                yield draft.problem(read.path, text, hint)
        for entry, term in call.loss.terms.items():
            if term.needs_whole_groups:
                text = f"the term {entry!r} compares samples of a group, but {name!r} trains on one sequence a row"
                hint = "take terms of single sequences, such as `cross_entropy: {}`"
                yield draft.problem(f"$.calls.{name}.loss.terms.{entry}", text, hint)


def mixed_samples(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Values per token belong to the samples whose tokens they are about."""
    for name, reads in draft.reads.items():
        own = None if works_on_data(draft.spec, draft.spec.calls[name]) else draft.samplers.get(name)
        for read in reads:
            write = next(iter(draft.writes.get(read.key, ())), None)
            if own is None or write is None or write.type is None or write.type.level != "token":
                continue
            other = _sampler(draft, write.call)
            if other not in ("", own):
                text = f"{name!r} works on the samples of {own!r}, but {read.key!r} is about those of {other!r}"
                hint = f"set `samples` in calls.{name} or calls.{write.call}: both must work on the same samples"
                yield draft.problem(read.path, text, hint)


def _sampler(draft: Draft, name: str) -> str:
    """The generate call to whose tokens belongs what a call writes; '' where that is not known."""
    call = draft.spec.calls.get(name)
    if isinstance(call, Generate):
        return name
    if not isinstance(call, Function):
        return draft.samplers.get(name, "")
    generates = [other for other, _ in draft.of(Generate)]
    read = {draft.producer(key) for key in call.keywords.values()}
    return next((other for other in generates if read & set(generates) == {other}), "")
