"""Chats to train on: which part of a rendered conversation the assistant says, and what ends its turn. No torch.

Both are read off the tokenizer's own template by rendering it: no names of tokens, no list of model families.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from realgraph.runtime.data.tokenize import (
    BARE,
    Message,
    Template,
    Tokenizer,
    cut,
    end_token,
    prompt_text,
    refusals,
    render,
    special_tokens,
)

_STAND_IN = "\ue000"  # a private character, so that no chat template treats it in a special way
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what the assistant says
_ASSISTANT = "assistant"


class AssistantTurn(NamedTuple):
    """Places in a rendered chat: where an assistant's words begin, and where its turn ends."""

    start: int
    end: int


class _By(NamedTuple):
    """The tokenizer, its special tokens, and the template that renders."""

    tokenizer: Tokenizer
    template: Template
    special: dict[str, int]

    def render(self, messages: Sequence[Message]) -> str:
        return render(messages, self.tokenizer, self.template, generation=False)


def chat_sample(
    messages: Sequence[Message], tokenizer: Tokenizer, template: Template = BARE
) -> tuple[list[int], list[bool]]:
    """Tokens of a chat; the mask is true on what the assistant says, with the end of each of its turns.

    A template that marks the assistant's part (`{% generation %}`) decides what that is; else an assistant's words
    are found by putting a stand-in in their place: templates may trim them, or rewrite earlier turns. What comes after
    the last turn's end (a newline of the template) is left out. Where the template ends the last turn with no special
    token, the tokenizer's end of sequence does. Raises ValueError for a chat without an assistant's turn or words, and
    where the template does not show one.
    """
    by = _By(tokenizer, template, special_tokens(tokenizer))
    whole = by.render(messages)
    turns = [k for k, message in enumerate(messages) if message.get("role") == _ASSISTANT]
    if not turns:
        raise ValueError("no message has the role 'assistant': there is nothing to train on")
    if not any(_says(messages[k]) for k in turns):
        raise ValueError("the assistant's messages are empty")
    assistant_turns = [_turn(whole, messages, k, by) for k in turns]
    spans = _marked(whole, messages, by)
    if spans is None:
        spans = [(turn.start, turn.end) for turn in assistant_turns]
    else:
        spans = [(a, next((t.end for t in assistant_turns if t.start <= b <= t.end), b)) for a, b in spans]
    tokens: list[int] = []
    mask: list[bool] = []
    for i, piece in enumerate(cut(whole, list(chain.from_iterable(_apart(spans))), tokenizer, special=False)):
        tokens += piece
        mask += [i % 2 == 1] * len(piece)
    last = max((t for t, learnt in enumerate(mask) if learnt), default=-1)
    if last < 0:
        raise ValueError("the chat template marks nothing as said by the assistant")
    tokens, mask = tokens[: last + 1], mask[: last + 1]
    if turns[-1] == len(messages) - 1 and not whole[: assistant_turns[-1].end].endswith(tuple(by.special)):
        return [*tokens, end_token(tokenizer)], [*mask, True]
    return tokens, mask


def turn_end_token(tokenizer: Tokenizer, template: Template = BARE) -> int | None:
    """The special token that ends an assistant's turn in the tokenizer's template; None where there is none."""
    if not tokenizer.chat_template:
        return None
    by = _By(tokenizer, template, special_tokens(tokenizer))
    try:
        ending = _ending({"role": _ASSISTANT, "content": _STAND_IN}, by)
    except ValueError:  # a template for other chats, which says so when one of them is rendered
        return None
    longest = sorted(by.special, key=len, reverse=True)
    return next((by.special[token] for token in longest if ending.endswith(token)), None)


def _says(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls") or message.get("reasoning_content"))


def _turn(whole: str, messages: Sequence[Message], k: int, by: _By) -> AssistantTurn:
    """The turn of message `k` in the rendered chat. Its tool calls are part of its turn."""
    changed = [{**message, "content": _STAND_IN} if i == k else message for i, message in enumerate(messages)]
    other = by.render(changed)
    if _STAND_IN not in other:
        raise ValueError(f"the chat template leaves out the assistant's message {k}")
    start = other.index(_STAND_IN)
    after = other[start + len(_STAND_IN) :]
    shared = min(start, len(_shared(whole, other)))
    ending = _shared(after, _ending(changed[k], by))
    end = max(shared, len(whole) - len(after) + len(ending))
    # What the template puts before an answer beyond the generation prompt (a space, an empty thinking block) is
    # part of the answer: a model that is asked has to write it.
    asked = prompt_text(messages[:k], by.tokenizer, by.template) if k > 0 else ""
    if k > 0 and whole.startswith(asked) and len(asked) < shared:
        shared = len(asked)
    return AssistantTurn(shared, end)


def _ending(message: Message, by: _By) -> str:
    """The end of a turn: what the template puts after the words of an assistant's message, which are the stand-in.

    It is what stands there both where the chat ends and where it goes on, up to the last special token; in a template
    without one, up to the last character that is no space.
    """
    user = {"role": "user", "content": "."}
    shared = by.render([user, message]).partition(_STAND_IN)[2]
    with suppress(
        ValueError
    ):  # after tool calls a template may want their results: then what it puts at the end counts
        shared = _shared(shared, by.render([user, message, user]).partition(_STAND_IN)[2])
    ends = [shared.rfind(token) + len(token) for token in by.special if token in shared]
    return shared[: max(ends)] if ends else shared.rstrip()


def _shared(one: str, other: str) -> str:
    """The beginning that two texts share."""
    length = min(len(one), len(other))
    return one[: next((i for i in range(length) if one[i] != other[i]), length)]


def _marked(whole: str, messages: Sequence[Message], by: _By) -> list[tuple[int, int]] | None:
    """The parts of the rendered chat that the template marks as the assistant's; None where it marks nothing."""
    source = by.tokenizer.get_chat_template(None, by.template.tools)
    if not _MARKED.search(source):
        return None
    from transformers.utils import chat_template_utils

    renderer: Any = chat_template_utils.render_jinja_template  # typed as giving a text
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    with refusals():
        (text,), (spans,) = renderer(
            conversations=[given],
            tools=by.template.tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **{**by.tokenizer.special_tokens_map, **by.template.args},
        )
    assert text == whole
    return list(spans)


def _apart(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans in order, none reaching into the next."""
    reached = 0
    for start, end in sorted(spans):
        yield max(start, reached), max(end, reached)
        reached = max(end, reached)
