"""From text and chats to token ids: prompts as they are at generation, samples with a mask to train on. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime import hub

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_STAND_IN = "\ue000"  # a private character, so that no chat template treats it in a special way


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any

    @property
    def eos_token_id(self) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder or Hub id; code that a repository brings along is never run.

    Raises ConfigError where there is none, or where it would need such code.
    """
    from transformers import AutoTokenizer  # late: it takes a second that a run without text need not spend

    options = {} if revision is None else {"revision": revision}
    folder = Path(path).expanduser()
    needed = "a folder needs tokenizer.json and tokenizer_config.json; tokenizers with their own code are refused"
    if folder.is_dir() and not any((folder / name).is_file() for name in VOCABULARIES):
        raise ConfigError([Problem(Where(path), "this folder has no tokenizer", needed, "tokenizer")])
    reason = "" if folder.is_dir() or path.startswith((".", "/", "~")) else hub.out_of_reach()
    try:
        found: Tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as error:
        text = f"no tokenizer can be loaded: {reason or str(error).splitlines()[0]}"
        hint = hub.hint(path, "model") if reason else needed
        raise ConfigError([Problem(Where(path), text, hint, "tokenizer")]) from error
    return found


def prompt_text(messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """A chat up to where the assistant's turn begins, by the tokenizer's template. Raises ValueError."""
    return _render(messages, tokenizer, generation=True)


def prompt_tokens(prompt: str | Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a plain prompt (with the tokenizer's own first token, if it has one) or of a chat."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=True)
    return tokenizer.encode(prompt_text(prompt, tokenizer), add_special_tokens=False)


def plain_sample(prompt: str, response: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens of prompt + response + end of sequence; the mask is true on the last two.

    The prompt's tokens are those it has at generation, so the response may be cut into other tokens than in one piece.
    """
    head, tail = _cut(prompt + response, (len(prompt),), tokenizer, special=True)
    tail = [*tail, *([] if tail[-1:] == [tokenizer.eos_token_id] else [_end(tokenizer)])]
    return head + tail, [False] * len(head) + [True] * len(tail)


def chat_sample(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens of a chat; the mask is true on what the assistant says, with the end of its turn.

    Where an assistant's words begin and end is found by putting a stand-in in their place: templates may trim them,
    or rewrite earlier turns. Tokens after the last turn's end (a newline of the template) are left out. Raises
    ValueError for a chat without an assistant's turn, and where the template does not show one.
    """
    whole = _render(messages, tokenizer, generation=False)
    turns = [k for k, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError("no message has the role 'assistant': there is nothing to train on")
    edges: list[int] = []
    for k in turns:
        start, end_of_words = _span(whole, messages, k, tokenizer)
        # What the template puts before an answer beyond the generation prompt (a space, an empty thinking block) is
        # part of the answer: a model that is asked has to write it.
        asked = prompt_text(messages[:k], tokenizer) if k > 0 else ""
        if k > 0 and whole.startswith(asked) and max(edges, default=0) <= len(asked) < start:
            start = len(asked)
        edges += [start, end_of_words]
    pieces = _cut(whole, edges, tokenizer, special=False)
    tokens: list[int] = []
    mask: list[bool] = []
    end = tokenizer.eos_token_id
    for i, piece in enumerate(pieces):
        learnt = [i % 2 == 1] * len(piece)
        if i % 2 == 0 and i > 0 and piece and piece[0] == end:
            learnt[0] = True
        tokens += piece
        mask += learnt
    last = max((t for t, learnt in enumerate(mask) if learnt), default=-1)
    if last < 0:
        raise ValueError("the assistant's messages are empty")
    tokens, mask = tokens[: last + 1], mask[: last + 1]
    if turns[-1] == len(messages) - 1 and tokens[-1] != end:
        return [*tokens, _end(tokenizer)], [*mask, True]
    return tokens, mask


def _span(whole: str, messages: Sequence[Message], k: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """Where the words of message `k` stand in the rendered chat."""
    changed = [{**message, "content": _STAND_IN} if i == k else message for i, message in enumerate(messages)]
    other = _render(changed, tokenizer, generation=False)
    if _STAND_IN not in other:
        raise ValueError(f"the chat template leaves out the assistant's message {k}")
    start = other.index(_STAND_IN)
    rest = len(other) - start - len(_STAND_IN)
    shared = min(start, next((i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), start))
    return shared, max(shared, len(whole) - rest)


def _render(messages: Sequence[Message], tokenizer: Tokenizer, *, generation: bool) -> str:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template for a list of messages")
    from jinja2 import TemplateError  # late: only chats need it

    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
        )
    except TemplateError as error:  # templates refuse roles and orders that they do not know
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return text


def _cut(text: str, edges: Iterable[int], tokenizer: Tokenizer, *, special: bool) -> list[list[int]]:
    """Token ids of the pieces of `text` between `edges`: of the whole text where its tokens end at every edge, else of
    each piece by itself."""
    cuts = list(edges)
    whole = tokenizer.encode(text, add_special_tokens=special)
    heads = [tokenizer.encode(text[:cut], add_special_tokens=special) for cut in cuts]
    if all(whole[: len(head)] == head for head in heads):
        bounds = [0, *(len(head) for head in heads), len(whole)]
        return [whole[a:b] for a, b in pairwise(bounds)]
    places = [0, *cuts, len(text)]
    spans = pairwise(places)
    return [tokenizer.encode(text[a:b], add_special_tokens=special and i == 0) for i, (a, b) in enumerate(spans)]


def _end(tokenizer: Tokenizer) -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError("the tokenizer has no end-of-sequence token to put after a response")
    return tokenizer.eos_token_id
