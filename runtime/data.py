"""A data set as a graph's inputs: rows by number, mapped to keys and tokenised. Knows no order of rows and no step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field

from realgraph.graphs.errors import ConfigError, Where, suggest
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, TOKENS, KeyType
from realgraph.graphs.spec import Generate, Train
from realgraph.runtime.job import DataSpec
from realgraph.runtime.row_files import RawRow, open_rows, problem
from realgraph.runtime.tokenize import Tokenizer, chat_sample, plain_sample, prompt_tokens

PROMPT, RESPONSE, MESSAGES, CHOSEN, REJECTED = "prompt", "response", "messages", "chosen", "rejected"


class Row(Struct, frozen=True):
    """One data row: a prompt group. group: key -> value, of the inputs of level group (token ids, text, numbers, JSON).

    samples: for graphs whose samples come from the data (SFT, reward models, DPO), the keys of each sample: `tokens`,
    `mask` and other inputs of the levels sample and token. raw: the row as it stands in the data.
    """

    index: int
    group: dict[str, Any]
    samples: tuple[dict[str, Any], ...] = ()
    raw: RawRow = field(default_factory=dict)


class TooLong(Struct, frozen=True):
    """A row that is left out: a prompt of `n_tokens` where `limit` are allowed (`too_long: drop`)."""

    index: int
    n_tokens: int
    limit: int


class _Overflow(Exception):
    """A prompt is too long, and such rows are dropped."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(n_tokens)
        self.n_tokens = n_tokens


def tokenizer_source(graph: Graph) -> tuple[str, str | None]:
    """Path and revision of the model whose tokenizer cuts the data: of the role that generates, else one that trains.

    Raises ConfigError where no such role has a path.
    """
    roles = [call.model for call in graph.calls.values() if isinstance(call, Generate)]
    roles += [call.model for call in graph.calls.values() if isinstance(call, Train)]
    for role in (*roles, *graph.models):
        seen: set[str] = set()
        while role in graph.models and role not in seen:
            model = graph.models[role]
            if model.path is not None:
                return model.path, model.revision
            seen.add(role)
            role = model.init or ""
    raise problem(Where(path="$.models"), "no model has a path, so there is no tokenizer", "set models.<role>.path")


class DataSet:
    """The rows of a data set as inputs of a graph. Reading is thread-safe.

    inputs: name -> type of the keys that the graph takes from the data. A key `k` stands in the column
    `spec.columns[k]`, or `k`. The keys `tokens` and `mask` are made of the columns `prompt` and `response`, or
    `messages`; with two samples a group, of `chosen` and `rejected` (texts after `prompt`, or chats); or they are
    columns themselves. Raises ConfigError for missing columns and inputs that data can't give.
    """

    def __init__(
        self, spec: DataSpec, inputs: Mapping[str, KeyType], tokenizer: Tokenizer, samples_per_group: int = 1
    ) -> None:
        self._spec, self._inputs, self._tokenizer, self._n = spec, dict(inputs), tokenizer, samples_per_group
        self._rows = open_rows(spec)
        self.columns = self._rows.columns
        self._chat = bool(tokenizer.chat_template) if spec.chat is None else spec.chat
        self._from_data = TOKENS in self._inputs
        self._shape = self._sample_shape() if self._from_data else ""
        self._check()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> Where:
        """The place of a row in the user's files."""
        return self._rows.where(index)

    def row(self, index: int) -> Row | TooLong:
        """Row `index`, from 0 to len - 1, tokenised. Raises ConfigError naming the file, line and column at fault."""
        raw = self._rows.read(index)
        try:
            group = {
                name: self._at(index, name, raw, partial(self._value, key=key))
                for name, key in self._inputs.items()
                if key.level == "group"
            }
            samples = self._samples(index, raw) if self._from_data else ()
        except _Overflow as overflow:
            return TooLong(index, overflow.n_tokens, self._spec.max_prompt_tokens)
        return Row(index, group, samples, raw)

    # --- columns ------------------------------------------------------------------------------------------------------

    def _column(self, name: str) -> str:
        return self._spec.columns.get(name, name)

    def _has(self, name: str) -> bool:
        return self._column(name) in self.columns

    def _sample_shape(self) -> str:
        """How `tokens` and `mask` are made: the name of the column that decides."""
        if self._has(TOKENS):
            return TOKENS
        if self._n == 2:
            if self._has(CHOSEN) and self._has(REJECTED):
                return CHOSEN
            wanted = f"{self._column(CHOSEN)!r} and {self._column(REJECTED)!r}"
        else:
            if self._has(PROMPT) and self._has(RESPONSE):
                return RESPONSE
            if self._has(MESSAGES):
                return MESSAGES
            wanted = f"{self._column(PROMPT)!r} and {self._column(RESPONSE)!r}, or {self._column(MESSAGES)!r}"
        hint = f"the columns are {', '.join(self.columns)}; map them in data.columns"
        raise problem(Where(self._spec.path), f"the graph needs the columns {wanted}", hint)

    def _check(self) -> None:
        for name, given in (("chat", self._spec.chat), ("system", self._spec.system)):
            if given and not self._tokenizer.chat_template:
                text = f"data.{name} is set, but the tokenizer has no chat template to put it in"
                raise problem(Where(path=f"$.data.{name}"), text, "leave it out, or take a model with a template")
        for name, key in self._inputs.items():
            made = self._from_data and name in (TOKENS, MASK)
            if key.level == "step" or (key.level != "group" and not self._from_data):
                raise problem(Where(path=f"$.inputs.{name}"), f"data can't give a key of the type {key}")
            if not made and not self._has(name):
                hint = suggest(self._column(name), self.columns) + f"; map it: data.columns.{name}"
                raise problem(Where(self._spec.path), f"there is no column {self._column(name)!r} for {name!r}", hint)

    def _at(self, index: int, name: str, raw: RawRow, convert: Callable[[Any], Any]) -> Any:
        """A column's value, converted; what is wrong with it is told with its place."""
        column = self._column(name)
        where = self._rows.where(index)
        place = Where(where.file, where.line, f"{where.path}.{column}")
        if column not in raw:
            raise problem(place, "this row lacks the column", f"it has {', '.join(raw)}")
        try:
            return convert(raw[column])
        except ValueError as error:
            raise ConfigError(problem(place, str(error)).problems) from error

    # --- values -------------------------------------------------------------------------------------------------------

    def _value(self, value: Any, key: KeyType) -> Any:
        """One value as a key's dtype. Raises ValueError."""
        match key.dtype:
            case "tokens":
                return self._fit(self._prompt(value))
            case "text":
                if isinstance(value, str):
                    return value
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return str(value)
                raise ValueError(f"expected text, got {_kind(value)}")
            case "json":
                return value
            case "bool":
                if isinstance(value, bool) or value in (0, 1):
                    return bool(value)
            case "int32" | "int64":
                if isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value:
                    return int(value)
            case "float32" | "float64":
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return float(value)
        raise ValueError(f"expected {key.dtype}, got {_kind(value)}")

    def _conversation(self, value: Any) -> str | list[dict[str, Any]]:
        """A prompt column's value: plain text, or messages (text is wrapped as a user's turn where chats are on)."""
        if isinstance(value, str):
            if self._spec.system is not None and not self._chat:
                raise ValueError("data.system needs chat messages, and data.chat is false: the prompt is plain text")
            return self._with_system([{"role": "user", "content": value}]) if self._chat else value
        return self._with_system(_messages(value))

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._spec.system is None or (messages and messages[0].get("role") == "system"):
            return messages
        return [{"role": "system", "content": self._spec.system}, *messages]

    def _prompt(self, value: Any) -> list[int]:
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return value
        tokens = prompt_tokens(self._conversation(value), self._tokenizer)
        if not tokens:
            raise ValueError("the prompt is empty")
        return tokens

    def _fit(self, tokens: list[int]) -> list[int]:
        """A prompt within its limit, by the policy for those that are too long. Raises _Overflow, or ValueError."""
        return tokens[self._excess(len(tokens)) :]

    def _excess(self, n_tokens: int) -> int:
        """How many tokens to cut from the left of a prompt."""
        limit = self._spec.max_prompt_tokens
        if n_tokens <= limit:
            return 0
        match self._spec.too_long:
            case "drop":
                raise _Overflow(n_tokens)
            case "truncate_left":
                return n_tokens - limit
            case "fail":
                raise ValueError(f"the prompt has {n_tokens} tokens, more than data.max_prompt_tokens = {limit}")

    # --- whole samples ------------------------------------------------------------------------------------------------

    def _samples(self, index: int, raw: RawRow) -> tuple[dict[str, Any], ...]:
        pieces = self._tokens_and_masks(index, raw)
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
        values = [value] if self._n == 1 else value
        if not isinstance(values, list) or len(values) != len(samples):
            raise ValueError(f"expected a list of {len(samples)}, one value a sample, got {_kind(value)}")
        if key.level == "sample":
            return [self._value(item, key) for item in values]
        for item, sample in zip(values, samples, strict=True):
            if not isinstance(item, list) or len(item) != len(sample[TOKENS]):
                raise ValueError(f"expected a list of {len(sample[TOKENS])}, one value a token, got {_kind(item)}")
        return [[self._value(one, KeyType("sample", key.dtype)) for one in item] for item in values]

    def _tokens_and_masks(self, index: int, raw: RawRow) -> list[tuple[list[int], list[bool]]]:
        match self._shape:
            case "tokens":
                return [self._given(index, raw)]
            case "messages":
                return [self._at(index, MESSAGES, raw, lambda value: self._chat_sample(_messages(value)))]
            case "response":
                prompt = self._at(index, PROMPT, raw, self._conversation)
                return [self._at(index, RESPONSE, raw, lambda value: self._answered(prompt, value))]
        prompt = self._at(index, PROMPT, raw, self._conversation) if self._has(PROMPT) else None
        return [self._at(index, name, raw, lambda value: self._answered(prompt, value)) for name in (CHOSEN, REJECTED)]

    def _given(self, index: int, raw: RawRow) -> tuple[list[int], list[bool]]:
        """Tokens (and mask) that stand in the data."""
        tokens: list[int] = self._at(index, TOKENS, raw, _token_ids)
        if not self._has(MASK):
            return tokens, [i > 0 for i in range(len(tokens))]
        mask = self._at(index, MASK, raw, lambda value: [bool(item) for item in value])
        if len(mask) != len(tokens):
            place = self._rows.where(index)
            raise problem(place, f"{len(tokens)} tokens, but a mask of {len(mask)}")
        return tokens, mask

    def _answered(self, prompt: str | list[dict[str, Any]] | None, value: Any) -> tuple[list[int], list[bool]]:
        """A prompt with its response: a text, the assistant's messages, or (without a prompt) a whole chat."""
        if isinstance(value, str):
            if prompt is None:
                raise ValueError("a text needs a column 'prompt' before it")
            if isinstance(prompt, str):
                return self._cut_left(plain_sample(prompt, value, self._tokenizer))
            return self._chat_sample([*prompt, {"role": "assistant", "content": value}])
        messages = _messages(value)
        before = [] if prompt is None else [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        starts_again = messages[: len(before)] == before or any(m.get("role") == "user" for m in messages[:2])
        return self._chat_sample(messages if starts_again else [*before, *messages])

    def _chat_sample(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        return self._cut_left(chat_sample(self._with_system(messages), self._tokenizer))

    def _cut_left(self, sample: tuple[list[int], list[bool]]) -> tuple[list[int], list[bool]]:
        """The limit on prompts holds for what stands before the first token that is trained on."""
        tokens, mask = sample
        excess = self._excess(mask.index(True))
        return tokens[excess:], mask[excess:]


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected text or a list of chat messages, got {_kind(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"expected messages with `role` and `content`, got {_kind(message)}")
    return [dict(message) for message in value]


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(isinstance(item, int) for item in value):
        raise ValueError(f"expected a list of token ids, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
