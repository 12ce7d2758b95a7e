"""Rules about a run of the graph: its data, its batch, its staleness. Silent where the facts are unknown."""

from collections.abc import Iterator

from realgraph.graphs.check.maths import terms_of
from realgraph.graphs.errors import Problem, suggest
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import INPUT
from realgraph.graphs.infer import Draft
from realgraph.graphs.keys import MASK, TOKENS
from realgraph.graphs.maths import Ignore, PolicyGradient
from realgraph.graphs.spec import Generate, Train, works_on_data

SEQUENCE_COLUMNS = (("prompt", "response"), ("messages",))
TOOLS = "tools"  # a column for the chat template, whatever the inputs
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))


def read_inputs(draft: Draft) -> list[str]:
    """The inputs that some call reads, in the graph's order: what nobody reads is not asked of the data."""
    used = {read.key for reads in draft.reads.values() for read in reads}
    return [key for key in draft.spec.inputs if key in used and draft.producer(key) == INPUT]


def _on_data(draft: Draft) -> bool:
    """True where a call trains on sequences of the data beside generated samples."""
    return any(works_on_data(draft.spec, call) for call in draft.spec.calls.values())


def unknown_input(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """`data.columns` maps inputs that the graph has."""
    known = {*draft.spec.inputs, TOOLS}
    if TOKENS in known or _on_data(draft):
        known |= {name for names in (*SEQUENCE_COLUMNS, *PAIR_COLUMNS) for name in names}
    for name in facts.data_columns:
        if name not in known:
            text = f"the graph {draft.spec.name!r} has no input {name!r}"
            yield draft.problem(f"$.data.columns.{name}", text, suggest(name, known))


def missing_column(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The data have a column for every input that is read."""
    if facts.columns is None:
        return
    inputs = read_inputs(draft)
    if TOKENS in inputs or _on_data(draft):
        yield from _sequence_columns(draft, facts, facts.columns)
    for name in inputs:
        column = facts.data_columns.get(name, name)
        if column not in facts.columns and name not in (TOKENS, MASK):
            text = f"the data have no column {column!r} for the input {name!r}"
            close = suggest(column, facts.columns)
            mapped = f"map it: data.columns.{name}: <column>"
            hint = close if name in facts.data_columns else f"{mapped}; {close}" if close else mapped
            yield draft.problem(f"$.data.columns.{name}", text, hint)


def _sequence_columns(draft: Draft, facts: Facts, columns: tuple[str, ...]) -> Iterator[Problem]:
    """Whole sequences are made of a prompt and a response, of messages, or of a chosen and a rejected response."""
    pairs = draft.samples_per_group == 2 and not _on_data(draft)
    choices = PAIR_COLUMNS if pairs else SEQUENCE_COLUMNS
    named = [[facts.data_columns.get(name, name) for name in names] for names in choices]
    if any(all(column in columns for column in names) for names in named):
        return
    mapped = {name for names in choices for name in names if facts.data_columns.get(name, name) not in columns}
    wrong = sorted(mapped & facts.data_columns.keys())
    path = f"$.data.columns.{wrong[0]}" if wrong else "$.data.columns"
    wanted = ", or ".join(" and ".join(names) for names in choices)
    text = f"the data lack the columns that {TOKENS!r} is made of: {wanted}"
    yield draft.problem(path, text, f"map them under data.columns; the data have: {', '.join(columns)}")


def small_data(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """One step's groups are different rows."""
    if facts.n_rows == 0:
        yield draft.problem("$.data.path", "the data set is empty", "give data with at least batch.groups rows")
    elif facts.n_rows is not None and facts.groups is not None and facts.n_rows < facts.groups + facts.surplus:
        rows = f"{facts.n_rows} row{'s' * (facts.n_rows != 1)}"
        begun = f", and {facts.surplus} more by batch.oversample" if facts.surplus else ""
        text = f"a step takes {facts.groups} groups{begun}, but the data set has {rows}"
        hint = f"set batch.groups to at most {facts.n_rows}, or give more data"
        yield draft.problem("$.batch.groups", text, f"{hint}; or lower batch.oversample" if begun else hint)


def surplus_without_cause(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A surplus of groups is begun where samples are generated, and left out where some are trained before others."""
    generates, trains = any(draft.of(Generate)), any(draft.of(Train))
    if facts.surplus and not (generates and trains):
        missing = "trains" if generates else "generates"
        text = f"{facts.surplus} groups more are begun than a step takes, but no call {missing}"
        yield draft.problem("$.batch.oversample", text, "leave batch.oversample out")


def uneven_minibatches(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Mini-batches are equal and hold whole groups."""
    if facts.groups is None:
        return
    for name, call in draft.of(Train):
        if facts.groups % call.minibatches:
            groups = f"{facts.groups} group{'s' * (facts.groups != 1)}"
            text = f"{groups} can't be cut into {call.minibatches} equal mini-batches of whole groups"
            fitting = [n for n in range(1, facts.groups + 1) if facts.groups % n == 0]
            near = sorted(fitting, key=lambda n: abs(n - call.minibatches))[:3]
            hint = f"{facts.groups} divides into {', '.join(map(str, sorted(near)))}; or change batch.groups"
            yield draft.problem(f"$.calls.{name}.minibatches", text, hint)


def stale_uncorrected(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Samples of older weights need an off-policy correction."""
    if facts.staleness == 0:
        return
    for path, _, entry, term in terms_of(draft):
        if isinstance(term, PolicyGradient) and term.off_policy == Ignore(uncorrected=False):
            text = f"samples may be {facts.staleness} steps old, but the term {entry!r} ignores that"
            hint = (
                "write `off_policy: {kind: decoupled}` (or truncated, or masked), or set staleness: 0; naive PPO, to "
                "compare with, is `{kind: ignore, uncorrected: true}`"
            )
            yield draft.problem(f"{path}.off_policy", text, hint)


def stale_without_cause(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Staleness is the lag between a training and a generating role: without both it means nothing."""
    if facts.staleness == 0:
        return
    trained = {call.model for _, call in draft.of(Train)}
    if not any(call.model in trained for _, call in draft.of(Generate)):
        text = f"staleness is {facts.staleness}, but no call generates with a trained role"
        yield draft.problem("$.staleness", text, "set staleness: 0, or leave it out")
