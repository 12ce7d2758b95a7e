"""The data of one worker: rows of prompt groups into the store, prompts of held-out rows and those that other calls
wrote, tokens back to text."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from realgraph.graphs.graph import INPUT
from realgraph.graphs.keys import OF_DATA, TOKENS
from realgraph.graphs.spec import Generate
from realgraph.runtime.data.data import DataRow, DataSet, PromptConversation, TooLong, tokenizer_source
from realgraph.runtime.data.own_tokens import open_own_tokens
from realgraph.runtime.data.read_ahead import ReadAhead
from realgraph.runtime.data.tokenize import Tokenizer, load_tokenizer
from realgraph.runtime.generate.rollouts import Rollouts
from realgraph.runtime.job.cursor import row_of
from realgraph.runtime.job.job import DataSpec, Job
from realgraph.runtime.job.sample_ids import group_of, row_held_out, sample_id
from realgraph.runtime.store.assemble import Assembler, decode_value
from realgraph.runtime.wire.protocol import Sample, Submit

WrittenPrompts = dict[int, dict[int, Sequence[int]]]  # group -> sample -> token ids


class Prompt(Struct, frozen=True):
    """A held-out prompt: its row, its tokens, and the values of the graph's inputs for the scoring function."""

    row: int
    tokens: tuple[int, ...]
    values: dict[str, Any]
    asked: PromptConversation | None = None  # for roles with tokenizers of their own


def open_data(spec: DataSpec, job: Job, tokenizer: Tokenizer, *, held_out: bool = False) -> DataSet:
    """A data set as the graph's inputs; of held-out rows nothing is trained on. Raises ConfigError."""
    graph = job.graph
    inputs = {key.name: key.type for key in graph.inputs if not (held_out and key.name in OF_DATA)}
    return DataSet(spec, inputs, tokenizer, graph.samples_per_group, job.batch.max_new_tokens)


class Loading:
    """Reads rows for this worker. Raises ConfigError for data and tokenizers that can't be opened."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.tokenizer = load_tokenizer(*tokenizer_source(job.graph))
        self.own_tokens = open_own_tokens(job.graph)
        self._data = open_data(job.data, job, self.tokenizer)
        self.n_rows = len(self._data)
        self._a_step = job.batch.groups + job.batch.surplus
        self._ahead = ReadAhead(self._data.row, 2 * self._a_step)
        held_out = job.held_out
        self._eval = open_data(held_out, job, self.tokenizer, held_out=True) if held_out is not None else None
        limit = job.eval.limit if job.eval is not None else None
        n_eval = len(self._eval) if self._eval is not None else 0
        self.n_eval_rows = min(n_eval, limit) if limit is not None else n_eval

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt_tokens(self, value: object) -> Sequence[int]:
        """Token ids of a prompt that is none of the data, rendered as those are. Raises ValueError."""
        return self._data.prompt_tokens(value)

    def prompt_text(self, group: int) -> str:
        """The text of a group's prompt; '' where nothing is generated, or it is too long."""
        row = self._row(group) if self._job.graph.generates else None
        return self.decode(row.group[self._prompt_key]) if isinstance(row, DataRow) else ""

    def _row(self, group: int) -> DataRow | TooLong:
        return self._ahead.row(self._row_of(group))

    def _row_of(self, group: int) -> int:
        return row_of(group, self.n_rows, self._job.seed, self._job.data.shuffle)

    def load_prompts(
        self, groups: Sequence[int], assembler: Assembler, prompt_key: str
    ) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], dict[int, PromptConversation]]:
        """Put the inputs of groups into the store: (group -> prompt tokens, groups whose prompt is too long, group ->
        the prompt for roles with tokenizers of their own)."""
        rows, skipped = self._load(groups, assembler)
        asked = {group: self._data.asked(row, prompt_key) for group, row in rows.items()} if self.own_tokens else {}
        return {group: tuple(row.group[prompt_key]) for group, row in rows.items()}, skipped, asked

    def load_samples(self, groups: Sequence[int], assembler: Assembler) -> tuple[tuple[Sample, ...], tuple[int, ...]]:
        """Put groups whose samples come from the data into the store: (samples, groups that are too long)."""
        rows, skipped = self._load(groups, assembler)
        return _samples(rows), skipped

    def load_held_out(self, groups: Sequence[int], assembler: Assembler) -> tuple[Sample, ...]:
        """Put the held-out rows of groups into the store; those that are too long are left out."""
        assert self._eval is not None
        read = {group: self._eval.row(row_held_out(group)) for group in groups}
        loaded = {group: row for group, row in read.items() if isinstance(row, DataRow)}
        _put(loaded, assembler)
        return _samples(loaded)

    def _load(self, groups: Sequence[int], assembler: Assembler) -> tuple[dict[int, DataRow], tuple[int, ...]]:
        """The rows of groups, their keys in the store: by group, and by sample where the data give samples."""
        loaded = {group: self._row(group) for group in groups}
        if not self._job.staleness:  # each step asks for its groups at once, after training
            self._ahead.expect(self._row_of(group + self._a_step) for group in groups)
        rows = {group: row for group, row in loaded.items() if isinstance(row, DataRow)}
        _put(rows, assembler)
        return rows, tuple(group for group in groups if group not in rows)

    def eval_prompts(self, rows: Sequence[int], *, asked: bool) -> list[Prompt]:
        """The held-out prompts of these rows; those that are too long are left out. asked: with their conversations,
        for roles with tokenizers of their own."""
        assert self._eval is not None
        prompts = []
        for index in rows:
            row = self._eval.row(index)
            if isinstance(row, DataRow):
                asked_as = self._eval.asked(row, self._prompt_key) if asked and self.own_tokens else None
                prompts.append(Prompt(index, tuple(row.group[self._prompt_key]), row.group, asked_as))
        return prompts

    @property
    def _prompt_key(self) -> str:
        graph = self._job.graph
        for name in graph.generates[:1] if graph.leading else ():
            call = graph.calls[name]
            assert isinstance(call, Generate)
            return call.reads[0]
        return next(key.name for key in graph.inputs if key.type.dtype == "tokens")


def _put(rows: Mapping[int, DataRow], assembler: Assembler) -> None:
    """Store the keys of rows: by group, and by sample where the data give samples."""
    columns: dict[str, dict[int, Any]] = {}
    for group, row in rows.items():
        for name, value in row.group.items():
            columns.setdefault(name, {})[group] = value
        for index, keys in enumerate(row.samples):
            for name, value in keys.items():
                columns.setdefault(name, {})[sample_id(group, index)] = value
    for name, column in columns.items():
        assembler.put_values(name, tuple(column), tuple(column.values()))


def _samples(rows: Mapping[int, DataRow]) -> tuple[Sample, ...]:
    """The samples that rows of data give."""
    return tuple(
        Sample(sample_id(group, index), len(keys[TOKENS]))
        for group, row in rows.items()
        for index, keys in enumerate(row.samples)
    )


class PromptError(Exception):
    """A function wrote what can't be a prompt."""


class LaterPrompts:
    """Fetches prompts, and holds them to their limit. Used by the compute thread alone."""

    def __init__(self, job: Job, assembler: Assembler, loading: Loading) -> None:
        self._job, self._assembler, self._loading = job, assembler, loading

    def prompts(self, work: Submit, rollouts: Rollouts) -> tuple[WrittenPrompts, tuple[int, ...]]:
        """(the prompts of groups, the groups of which a prompt is too long). Raises PromptError."""
        key = rollouts.prompt_key
        kind = self._job.graph.keys[key].type
        of_groups = dict[int, dict[int, None]]()  # the samples of each, as the sources tell
        for source in work.sources:
            for sample in source.samples:
                of_groups.setdefault(group_of(sample), {})[sample] = None
        values = self._assembler.gather(work.sources, [sample for own in of_groups.values() for sample in own])
        limit = self._limit(rollouts)
        found: WrittenPrompts = {}
        for group in work.groups:
            prompts: dict[int, Sequence[int]] = {}
            for sample in rollouts.samples_beside(group, of_groups[group]):
                value = self._assembler.value(values, key, sample)
                prompts[sample] = self._tokens(rollouts.name, sample, decode_value(value, kind))
            if all(len(tokens) <= limit for tokens in prompts.values()):
                found[group] = prompts
        return found, tuple(group for group in work.groups if group not in found)

    def _tokens(self, name: str, sample: int, value: object) -> Sequence[int]:
        """The token ids of a prompt, given as ids or as a text. Raises PromptError."""
        try:
            return self._loading.prompt_tokens(value)
        except ValueError as error:
            raise PromptError(f"the prompt of {name!r} for sample {sample} can't be used: {error}") from error

    def _limit(self, rollouts: Rollouts) -> int:
        """The longest prompt: as the graph says, or as long as a prompt of the data with its response; and no longer
        than the call's cache has room for."""
        call, job = self._job.graph.calls[rollouts.name], self._job
        assert isinstance(call, Generate)
        limit = job.data.max_prompt_tokens
        if job.graph.keys[rollouts.prompt_key].producer != INPUT:
            limit = call.max_prompt_tokens or limit + job.batch.max_new_tokens
        cache = job.plan.allocations[rollouts.name].most_cache_tokens
        return limit if cache is None else min(limit, cache - rollouts.sampling.max_new_tokens)
