"""Tokenizers, and prompts as the token ids that generation sees. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from realgraph.graphs.errors import ConfigError, Problem, Where, in_words
from realgraph.runtime.data import hub

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Any: ...

    @property
    def special_tokens_map(self) -> Any: ...

    @property
    def all_special_tokens(self) -> Any: ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str: ...


class Template(NamedTuple):
    """Arguments of a chat template beside the messages."""

    args: Mapping[str, Any] = {}  # by name, such as `enable_thinking`
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas


BARE = Template()


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
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # of a damaged file transformers and tokenizers raise anything, bare Exceptions too
        text = f"no tokenizer can be loaded: {reason or in_words(error)}"
        hint = hub.hint(path, "model") if reason else needed
        raise ConfigError([Problem(Where(path), text, hint, "tokenizer")]) from error
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that decoding leaves out of a text, by how they are written."""
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    return {**{str(token): index for token, index in named.items() if isinstance(index, int)}, **special}


def render(messages: Sequence[Message], tokenizer: Tokenizer, template: Template, *, generation: bool) -> str:
    """A chat as text, by the tokenizer's template; with `generation` up to where the assistant's turn begins.

    Raises ValueError where there is no template, or it refuses these messages.
    """
    if not tokenizer.chat_template:
        hint = "take a chat model, put a chat_template.jinja into the model's folder, or give prompts as text"
        raise ValueError(f"the tokenizer has no chat template for a list of messages: {hint}")
    options: dict[str, Any] = {**template.args, "tools": template.tools}
    with refusals():
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation, **options
        )
    return text


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what a template raises into a ValueError: templates refuse roles and orders that they do not know, and trip
    over values of kinds that they do not expect."""
    from jinja2 import TemplateError  # late: only chats need it

    try:
        yield
    except (TemplateError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def prompt_text(messages: Sequence[Message], tokenizer: Tokenizer, template: Template = BARE) -> str:
    """A chat up to where the assistant's turn begins, by the tokenizer's template. Raises ValueError."""
    return render(messages, tokenizer, template, generation=True)


def prompt_tokens(prompt: str | Sequence[Message], tokenizer: Tokenizer, template: Template = BARE) -> list[int]:
    """Token ids of a plain prompt (with the tokenizer's own first token, if it has one) or of a chat."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=True)
    return tokenizer.encode(prompt_text(prompt, tokenizer, template), add_special_tokens=False)


def plain_sample(prompt: str, response: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens of prompt + response + end of sequence; the mask is true on the last two.

    The prompt's tokens are those it has at generation, so the response may be cut into other tokens than in one piece.
    """
    head, tail = cut(prompt + response, (len(prompt),), tokenizer, special=True)
    tail = [*tail, *([] if tail[-1:] == [tokenizer.eos_token_id] else [end_token(tokenizer)])]
    return head + tail, [False] * len(head) + [True] * len(tail)


def cut(text: str, edges: Iterable[int], tokenizer: Tokenizer, *, special: bool) -> list[list[int]]:
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


def end_token(tokenizer: Tokenizer) -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError("the tokenizer has no end-of-sequence token to put after a response")
    return tokenizer.eos_token_id
