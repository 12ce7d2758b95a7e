"""Rows for a rehearsal from the run's own data and tokenizer, where both lie on this machine: what the columns, the
chat template and the tokenizer make of them, at toy length and in the toy vocabulary."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, OF_DATA, TOKENS
from realgraph.rehearsal.models import CHARACTERS
from realgraph.rehearsal.scale import ToyScale
from realgraph.runtime.data.row_files import files_at
from realgraph.runtime.job.job import DataSpec

if TYPE_CHECKING:
    from realgraph.runtime.data.data import DataRow

PROMPT, RESPONSE, CHOSEN, REJECTED = "prompt", "response", "chosen", "rejected"


def real_rows(data: DataSpec, graph: Graph, scale: ToyScale, n_rows: int) -> list[dict[str, Any]]:
    """The first `n_rows` rows that are not too long; none where data or tokenizer are not here. Raises ConfigError for
    rows that the run could not read either."""
    from realgraph.runtime.data.data import DataRow, DataSet, tokenizer_source
    from realgraph.runtime.data.tokenize import VOCABULARIES, load_tokenizer

    folder = Path(tokenizer_source(graph)[0]).expanduser()
    if not files_at(data.path) or not any((folder / name).is_file() for name in VOCABULARIES):
        return []
    inputs = {key.name: key.type for key in graph.inputs}
    rows = DataSet(data, inputs, load_tokenizer(str(folder)), graph.samples_per_group)
    kept = (row for row in map(rows.row, range(len(rows))) if isinstance(row, DataRow))
    return [_toy_row(row, graph, scale) for row in islice(kept, n_rows)]


def _toy_row(row: "DataRow", graph: Graph, scale: ToyScale) -> dict[str, Any]:
    toy: dict[str, Any] = dict(_texts(row.samples, scale)) if row.samples else {}
    if row.group.keys() >= OF_DATA.keys():
        tokens, mask = (row.group[name] for name in OF_DATA)
        toy |= _texts([{TOKENS: tokens, MASK: mask}], scale)
    for key in graph.inputs:
        if key.name in OF_DATA or (key.name in (TOKENS, MASK) and row.samples):
            continue
        if key.type.level == "group":
            value = row.group[key.name]
            toy[key.name] = _toy_text(value, scale, scale.prompt) if key.type.dtype == "tokens" else value
        else:
            values = [sample[key.name] for sample in row.samples]
            toy[key.name] = values[0] if len(values) == 1 else values
    return toy


def _texts(samples: Sequence[dict[str, Any]], scale: ToyScale) -> Iterator[tuple[str, str]]:
    """The columns that the samples of a row are made of again: a prompt up to the first token that is trained on."""
    names = (CHOSEN, REJECTED) if len(samples) == 2 else (RESPONSE,)
    for name, sample in zip(names, samples, strict=True):
        begins = max(1, sample[MASK].index(True))
        yield PROMPT, _toy_text(sample[TOKENS][:begins], scale, scale.prompt)
        yield name, _toy_text(sample[TOKENS][begins:], scale, scale.response)[:-1]  # the end of the sequence follows


def _toy_text(tokens: Sequence[int], scale: ToyScale, most: int) -> str:
    """The last of these tokens, as many as their number comes to on the rehearsal's scale, each as a character."""
    n = min(scale.shortened(len(tokens)), scale.shortened(most))
    return "".join(CHARACTERS[token % len(CHARACTERS)] for token in tokens[-n:])
