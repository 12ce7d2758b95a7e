"""A data set as a graph's inputs: rows by number, mapped to keys and tokenised. Knows no order of rows and no step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, assert_never, cast

from msgspec import Struct, field

from realgraph.graphs.errors import Where, suggest
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, OF_DATA, TOKENS, KeyType
from realgraph.graphs.spec import Generate, Train
from realgraph.runtime.data.chats import chat_sample
from realgraph.runtime.data.columns import column_names, value_at
from realgraph.runtime.data.conversations import Conversation, Conversations, Misplaced, is_whole_chat
from realgraph.runtime.data.row_content import cell_value, is_ids, kind, mask_of, number, problem, token_ids
from realgraph.runtime.data.row_files import RawRow, open_rows
from realgraph.runtime.data.tokenize import BARE, Template, Tokenizer, plain_sample, prompt_tokens, special_tokens
from realgraph.runtime.job.job import DataSpec

PROMPT, RESPONSE, MESSAGES, CHOSEN, REJECTED = "prompt", "response", "messages", "chosen", "rejected"
TOOLS = "tools"

SampleShape = Literal["tokens", "messages", "response", "chosen"]  # the column that decides what samples are made of


class DataRow(Struct, frozen=True):
    """One data row: a prompt group."""

    index: int
    group: dict[str, Any]  # key -> value, of the inputs of level group: token ids, text, numbers, JSON
    # Key -> value of each sample, for graphs whose samples come from the data (SFT, reward models, DPO): `tokens`,
    # `mask` and other inputs of the levels sample and token.
    samples: tuple[dict[str, Any], ...] = ()
    raw: RawRow = field(default_factory=dict)  # as it stands in the data


class PromptConversation(NamedTuple):
    """A prompt as a conversation, for tokenizers other than the one that cut it."""

    conversation: Conversation
    tools: Sequence[Mapping[str, Any]] | None = None  # for the chat template


class TooLong(Struct, frozen=True):
    """A row that is left out: a prompt or sequence of `n_tokens` where `limit` are allowed (`too_long: drop`)."""

    index: int
    n_tokens: int
    limit: int


class _Overflow(Exception):
    """A prompt or a sequence is too long, and such rows are dropped."""

    def __init__(self, n_tokens: int, limit: int) -> None:
        super().__init__(n_tokens)
        self.n_tokens, self.limit = n_tokens, limit


def tokenizer_source(graph: Graph) -> tuple[str, str | None]:
    """Path and revision of the model whose tokenizer cuts the data: of the role that generates, else one that trains.

    Raises ConfigError where no such role has a path.
    """
    roles = [call.model for call in graph.calls.values() if isinstance(call, Generate)]
    roles += [call.model for call in graph.calls.values() if isinstance(call, Train)]
    for role in (*roles, *graph.models):
        source = _source(graph, role)
        if source is not None:
            return source
    raise problem(Where(path="$.models"), "no model has a path, so there is no tokenizer", "set models.<role>.path")


def model_source(graph: Graph, role: str) -> tuple[str, str | None]:
    """Path and revision of a role's own model, or of the one that it starts as. Raises ConfigError."""
    source = _source(graph, role)
    if source is None:
        raise problem(Where(path=f"$.models.{role}"), "no path, so there is no tokenizer", f"set models.{role}.path")
    return source


def _source(graph: Graph, role: str) -> tuple[str, str | None] | None:
    seen: set[str] = set()
    while role in graph.models and role not in seen:
        model = graph.models[role]
        if model.path is not None:
            return model.path, model.revision
        seen.add(role)
        role = model.init or ""
    return None


class DataSet:
    """The rows of a data set as inputs of a graph. Reading is thread-safe.

    inputs: name -> type of the keys that the graph takes from the data. A key `k` stands in the column
    `spec.columns[k]`, or `k`. The keys `tokens` and `mask` are made of the columns `prompt` and `response`, or
    `messages`; with two samples a group, of `chosen` and `rejected` (texts after `prompt`, or chats); or they are
    columns themselves. So are those of OF_DATA, of one sequence a row beside generated samples. max_new_tokens: of
    the run; a sequence has at most so many beside `spec.max_prompt_tokens`. None: any number.

    Raises ConfigError for missing columns and inputs that data can't give.
    """

    def __init__(
        self,
        spec: DataSpec,
        inputs: Mapping[str, KeyType],
        tokenizer: Tokenizer,
        samples_per_group: int = 1,
        max_new_tokens: int | None = None,
    ) -> None:
        self._spec, self._inputs, self._tokenizer, self._n = spec, dict(inputs), tokenizer, samples_per_group
        self._max_new_tokens = max_new_tokens
        self._rows = open_rows(spec)
        self.columns = self._rows.columns
        self._chats = Conversations(spec, tokenizer)
        self._n_vocabulary = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self._from_data = TOKENS in self._inputs
        self._beside = not self._from_data and not self._inputs.keys().isdisjoint(OF_DATA)
        self._shape: SampleShape | None = self._sample_shape() if self._from_data or self._beside else None
        self._check()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> Where:
        """The place of a row in the user's files."""
        return self._rows.where(index)

    def row(self, index: int) -> DataRow | TooLong:
        """Row `index`, from 0 to len - 1, tokenised. Raises ConfigError naming the file, line and column at fault."""
        raw = self._rows.read(index)
        template = self._template(index, raw)
        try:
            group = {
                name: self._at(index, name, raw, partial(self._value, key=key, template=template))
                for name, key in self._inputs.items()
                if key.level == "group" and name not in OF_DATA
            }
            if self._beside:
                group |= zip(OF_DATA, self._sequences(index, raw, template)[0], strict=True)
            samples = self._samples(index, raw, template) if self._from_data else ()
        except _Overflow as overflow:
            return TooLong(index, overflow.n_tokens, overflow.limit)
        return DataRow(index, group, samples, raw)

    def asked(self, row: DataRow, name: str) -> PromptConversation:
        """The conversation of the prompt `name` of a row, before it became tokens, and the tools that belong to it."""
        value, template = value_at(row.raw, self._column(name)), self._template(row.index, row.raw)
        text = str(self._tokenizer.decode(value, skip_special_tokens=True)) if is_ids(value) else None
        return PromptConversation(
            self._at(row.index, name, row.raw, self._conversation) if text is None else text, template.tools
        )

    def special_in(self, row: DataRow, name: str) -> str:
        """The first special token of the prompt `name`, a text that becomes a user's turn; '' where there is none."""
        value = None if name in OF_DATA else value_at(row.raw, self._column(name))
        if not self._chats.on or not isinstance(value, str):
            return ""
        return min((token for token in special_tokens(self._tokenizer) if token in value), key=value.index, default="")

    def prompt_tokens(self, value: object) -> list[int]:
        """A prompt that no row has, text or token ids, as tokens: as the prompts of rows. Raises ValueError."""
        return self._prompt(value, self._chats.template)

    # --- columns ------------------------------------------------------------------------------------------------------

    def _column(self, name: str) -> str:
        return self._spec.columns.get(name, name)

    def _has(self, name: str) -> bool:
        return self._column(name) in self.columns

    def _sample_shape(self) -> SampleShape:
        """The origin of `tokens` and `mask`. Raises ConfigError where the columns are missing."""
        if self._has(TOKENS):
            return "tokens"
        if self._n == 2 and self._from_data:
            if self._has(CHOSEN) and self._has(REJECTED):
                return "chosen"
            wanted = f"{self._column(CHOSEN)!r} and {self._column(REJECTED)!r}"
        else:
            if self._has(PROMPT) and self._has(RESPONSE):
                return "response"
            if self._has(MESSAGES):
                return "messages"
            wanted = f"{self._column(PROMPT)!r} and {self._column(RESPONSE)!r}, or {self._column(MESSAGES)!r}"
        hint = f"the columns are {', '.join(self.columns)}; map them in data.columns"
        raise problem(Where(self._spec.path), f"the graph needs the columns {wanted}", hint)

    def _check(self) -> None:
        for name, key in self._inputs.items():
            made = (self._from_data and name in (TOKENS, MASK)) or name in OF_DATA
            if key.level != "group" and not self._from_data:
                raise problem(Where(path=f"$.inputs.{name}"), f"data can't give a key of the type {key}")
            if not made and not self._has(name):
                hint = suggest(self._column(name), self.columns) + f"; map it: data.columns.{name}"
                raise problem(Where(self._spec.path), f"there is no column {self._column(name)!r} for {name!r}", hint)
        if TOOLS in self._spec.columns and TOOLS not in self._inputs:
            place = Where(path="$.data.columns.tools")
            if not self._has(TOOLS):
                raise problem(place, f"there is no column {self._column(TOOLS)!r}", suggest(TOOLS, self.columns))
            if not self._chats.takes_tools:
                text = "the tokenizer's chat template reads no tools"
                raise problem(place, text, "leave it out, or take a model whose template does")

    def _template(self, index: int, raw: RawRow) -> Template:
        """The arguments of the chat template for a row, with the tools of its own column."""
        if TOOLS in self._inputs or not self._chats.takes_tools or self._column(TOOLS) not in column_names(raw):
            return self._chats.template
        return cast(Template, self._at(index, TOOLS, raw, self._chats.with_tools))

    def _at(self, index: int, name: str, raw: RawRow, convert: Callable[[Any], Any]) -> Any:
        """A column's value, converted; what is wrong with it is told with its place."""
        column = self._column(name)
        where = self._rows.where(index)
        place = Where(where.file, where.line, f"{where.path}.{column}")
        try:
            value = value_at(raw, column)
        except KeyError:
            raise problem(place, "this row lacks the column", f"it has {', '.join(column_names(raw))}") from None
        try:
            return convert(value)
        except Misplaced as error:
            within = Where(place.file, place.line, f"{place.path}{error.path}")
            raise problem(within, str(error)) from error
        except ValueError as error:
            raise problem(place, str(error)) from error

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, value: Any, key: KeyType, template: Template = BARE, *, typed: bool = False) -> Any:
        """One value as a key's dtype. Raises ValueError."""
        if self._rows.all_text and not typed:
            value = cell_value(value, key.dtype)
        match key.dtype:
            case "tokens":
                self._chats.check_question(value)
                return self._fit(self._prompt(value, template))
            case "text":
                if isinstance(value, str):
                    return value
                if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
                    return str(value)  # NaN is how a table says that there is none
                raise ValueError(f"expected text, got {kind(value)}: an input `{key.level} json` takes any value")
            case "json":
                return value
            case "bool":
                if isinstance(value, bool) or value in (0, 1):
                    return bool(value)
            case "int32" | "int64" | "float32" | "float64":
                return number(value, key.dtype)
            case "experts":
                pass  # generation's to choose
        raise ValueError(f"expected {key.dtype}, got {kind(value)}")

    def _prompt(self, value: Any, template: Template) -> list[int]:
        if is_ids(value):
            return self._ids(value)
        tokens = prompt_tokens(self._chats.of_prompt(value), self._tokenizer, template)
        if not tokens:
            raise ValueError("the prompt is empty")
        return tokens

    def _ids(self, value: list[int]) -> list[int]:
        """Token ids of the data, which must be in the vocabulary. Raises ValueError."""
        outside = next((token for token in value if not 0 <= token < self._n_vocabulary), None)
        if outside is not None:
            raise ValueError(f"the token id {outside} is outside of the vocabulary of {self._n_vocabulary} tokens")
        return value

    def _fit(self, tokens: list[int]) -> list[int]:
        """A prompt within its limit, by the policy for those that are too long. Raises _Overflow, or ValueError."""
        return tokens[self._excess(len(tokens)) :]

    def _excess(self, n_tokens: int, max_new_tokens: int | None = None) -> int:
        """Number of tokens to cut from the left of a prompt, or of a sequence with at most so many beside one."""
        limit = self._spec.max_prompt_tokens + (max_new_tokens or 0)
        if n_tokens <= limit:
            return 0
        match self._spec.too_long:
            case "drop":
                raise _Overflow(n_tokens, limit)
            case "truncate_left":
                return n_tokens - limit
            case "fail":
                what, more = ("prompt", "") if max_new_tokens is None else ("sequence", " + batch.max_new_tokens")
                raise ValueError(f"the {what} has {n_tokens} tokens, more than data.max_prompt_tokens{more} = {limit}")

    # --- whole samples ------------------------------------------------------------------------------------------------

    def _samples(self, index: int, raw: RawRow, template: Template) -> tuple[dict[str, Any], ...]:
        pieces = self._sequences(index, raw, template)
        samples = tuple({TOKENS: tokens, MASK: mask} for tokens, mask in pieces)
        for name, key in self._inputs.items():
            if key.level not in ("sample", "token") or name in (TOKENS, MASK):
                continue
            values = self._at(index, name, raw, partial(self._sample_values, key=key, samples=samples))
            for sample, value in zip(samples, values, strict=True):
                sample[name] = value
        return samples

    def _sample_values(self, value: Any, key: KeyType, samples: Sequence[dict[str, Any]]) -> list[Any]:
        """A column's value for each sample of the row: itself, or for pairs a list of two."""
        value = value if self._n == 1 and key.level == "sample" else self._listed(value)
        values = [value] if self._n == 1 else value
        if not isinstance(values, list) or len(values) != len(samples):
            raise ValueError(f"expected a list of {len(samples)}, one value a sample, got {kind(value)}")
        if key.level == "sample":
            return [self._value(item, key, typed=self._n > 1) for item in values]
        for item, sample in zip(values, samples, strict=True):
            if not isinstance(item, list) or len(item) != len(sample[TOKENS]):
                raise ValueError(f"expected a list of {len(sample[TOKENS])}, one value a token, got {kind(item)}")
        return [[self._value(one, KeyType("sample", key.dtype), typed=True) for one in item] for item in values]

    def _sequences(self, index: int, raw: RawRow, template: Template) -> list[tuple[list[int], list[bool]]]:
        """Tokens and masks of the row's sequences, within their limit. No first token is learnt: it follows nothing."""
        found = self._tokens_and_masks(index, raw, template)
        try:
            limit = self._max_new_tokens
            cut = [0 if limit is None else self._excess(len(tokens), limit) for tokens, _ in found]
        except ValueError as error:
            raise problem(self._rows.where(index), str(error)) from error
        return [(ids[n:], [False, *mask[n + 1 :]][: len(ids) - n]) for n, (ids, mask) in zip(cut, found, strict=True)]

    def _tokens_and_masks(self, index: int, raw: RawRow, template: Template) -> list[tuple[list[int], list[bool]]]:
        chats = self._chats
        assert self._shape is not None
        match self._shape:
            case "tokens":
                return [self._given(index, raw)]
            case "messages":
                chat = self._at(index, MESSAGES, raw, lambda value: chats.messages(self._listed(value)))
                return [self._at(index, MESSAGES, raw, lambda _: self._chat_sample(chat, template))]
            case "response":
                names = [RESPONSE]
            case "chosen":
                names = [CHOSEN, REJECTED]
            case _:
                assert_never(self._shape)
        prompt = self._at(index, PROMPT, raw, self._conversation) if self._has(PROMPT) else None
        return [
            self._at(index, name, raw, lambda value: self._answered(prompt, self._listed(value), template))
            for name in names
        ]

    def _given(self, index: int, raw: RawRow) -> tuple[list[int], list[bool]]:
        """Tokens (and mask) that stand in the data."""
        tokens: list[int] = self._at(index, TOKENS, raw, lambda value: self._ids(token_ids(self._listed(value))))
        if not self._has(MASK):
            return tokens, [i > 0 for i in range(len(tokens))]
        mask = self._at(index, MASK, raw, lambda value: mask_of(self._listed(value)))
        if len(mask) != len(tokens):
            place = self._rows.where(index)
            raise problem(place, f"{len(tokens)} tokens, but a mask of {len(mask)}")
        return tokens, mask

    def _answered(self, prompt: Conversation | None, value: Any, template: Template) -> tuple[list[int], list[bool]]:
        """A prompt with its response: a text, the assistant's messages, or (without a prompt) a whole chat."""
        if isinstance(value, str):
            if prompt is None:
                raise ValueError("a text needs a column 'prompt' before it")
            if isinstance(prompt, str):
                return self._cut_left(plain_sample(prompt, value, self._tokenizer))
            return self._chat_sample([*prompt, {"role": "assistant", "content": value}], template)
        messages = self._chats.messages(value)
        before = [] if prompt is None else [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        starts_again = messages[: len(before)] == before or is_whole_chat(messages)
        return self._chat_sample(messages if starts_again else [*before, *messages], template)

    def _chat_sample(self, messages: list[dict[str, Any]], template: Template) -> tuple[list[int], list[bool]]:
        return self._cut_left(chat_sample(self._chats.with_system(messages), self._tokenizer, template))

    def _conversation(self, value: Any) -> Conversation:
        return self._chats.of_prompt(cell_value(value, "tokens") if self._rows.all_text else value)

    def _listed(self, value: Any) -> Any:
        """A list that stands as JSON in a text cell; anything else as it is."""
        if not self._rows.all_text or not isinstance(value, str):
            return value
        value = cell_value(value, "tokens")
        if isinstance(value, str) and value.lstrip().startswith("["):
            with suppress(ValueError):
                return cell_value(value, "json")
        return value

    def _cut_left(self, sample: tuple[list[int], list[bool]]) -> tuple[list[int], list[bool]]:
        """The limit on prompts holds for what stands before the first token that is trained on."""
        tokens, mask = sample
        excess = self._excess(mask.index(True))
        return tokens[excess:], mask[excess:]
