"""Chats as they stand in data: checked messages, the system message before them, the tools of a row. No torch."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from realgraph.graphs.errors import Where, suggest
from realgraph.runtime.data.row_content import kind, problem
from realgraph.runtime.data.tokenize import Template, Tokenizer, prompt_text
from realgraph.runtime.job.job import DataSpec

Conversation = str | list[dict[str, Any]]  # a plain prompt, or messages

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)  # what is between the brackets of a template
_NAME = re.compile(r"[A-Za-z_]\w*")


class Misplaced(ValueError):
    """Something wrong within a value; `path`: where in it, such as `[2].role`."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


def template_names(tokenizer: Tokenizer) -> frozenset[str]:
    """The names and words in the code of the tokenizer's chat templates."""
    templates = tokenizer.chat_template or ""
    sources = templates.values() if isinstance(templates, Mapping) else [templates]
    return frozenset(name for source in sources for code in _CODE.findall(source) for name in _NAME.findall(code))


def check_messages(value: Any, names: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """A list of chat messages, each with a known role and text. names: words of the chat template, which may know
    further roles. Raises ValueError naming the message and what is expected of it."""
    if not isinstance(value, list):
        raise ValueError(f"expected text or a list of chat messages, got {kind(value)}")
    if not value:
        raise ValueError("the list of messages is empty: expected at least one with `role` and `content`")
    return [_message(i, message, names) for i, message in enumerate(value)]


def _message(i: int, message: Any, names: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Misplaced(f"[{i}]", f"expected messages with `role` and `content`, got {kind(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        form = "; `from` and `value` are called `role` and `content` here" if "from" in message else ""
        got = kind(message) if role is None else f"the role {kind(role)}"
        raise Misplaced(f"[{i}]", f"expected messages with `role` and `content`, got {got}{form}")
    if role not in ROLES and role not in names:
        close = difflib.get_close_matches(role, ROLES, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise Misplaced(f"[{i}].role", f"unknown role {role!r}: expected one of {', '.join(ROLES)}{meant}")
    if isinstance(content, list):
        raise Misplaced(f"[{i}].content", "expected text, got a list of parts: join the texts of the parts")
    if content is None and not message.get("tool_calls"):
        raise Misplaced(f"[{i}]", f"expected messages with `role` and `content`, got {kind(message)}")
    if content is not None and not isinstance(content, str):
        raise Misplaced(f"[{i}].content", f"expected text, got {kind(content)}")
    return dict(message)


def is_whole_chat(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True where the first message, but for system messages, is a user's: nothing stands before it."""
    return (
        next((message["role"] for message in messages if message["role"] not in ("system", "developer")), "") == "user"
    )


def check_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """A row's tools: a list of JSON schemas, or JSON text of one; null and [] are none. Raises ValueError."""
    if isinstance(value, str) and value.strip():
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a list of tools, and this text is no JSON: {error}") from error
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"expected a list of tools, each a JSON schema, got {kind(value)}")
    return tuple(value)


def _left_out(chat: list[dict[str, Any]], i: int, tokenizer: Tokenizer, template: Template) -> bool:
    """True where the chat is rendered as without its message `i`; one that is refused is named with its row."""
    text = (chat[i].get("content") or "").strip()
    try:
        given = prompt_text(chat, tokenizer, template)
        return text not in given and given == prompt_text([*chat[:i], *chat[i + 1 :]], tokenizer, template)
    except ValueError:
        return False


class Conversations:
    """A data set's chats by its settings and the tokenizer's template.

    Raises ConfigError for settings that the template has no place for.
    """

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer, self.names = spec, tokenizer, template_names(tokenizer)
        self._rendered: set[tuple[str, bool]] = set()  # roles that the template has been tried with; True: first
        self.on = bool(tokenizer.chat_template) if spec.chat is None else spec.chat
        self.template = Template(spec.template_args, spec.tools)
        self._check(tokenizer)

    def _check(self, tokenizer: Tokenizer) -> None:
        spec, has_template = self._spec, bool(tokenizer.chat_template)
        set_ = {"chat": spec.chat, "system": spec.system, "template_args": spec.template_args, "tools": spec.tools}
        for name, given in set_.items():
            if given and not has_template:
                text = f"data.{name} is set, but the tokenizer has no chat template to put it in"
                raise problem(Where(path=f"$.data.{name}"), text, "leave it out, or take a model with a template")
        for name in spec.template_args:
            if name not in self.names:
                text = f"the tokenizer's chat template reads no {name!r}: it would change nothing"
                raise problem(Where(path=f"$.data.template_args.{name}"), text, suggest(name, self.names))
        if spec.tools and not self.takes_tools:
            text = "data.tools is set, but the tokenizer's chat template reads no tools"
            raise problem(Where(path="$.data.tools"), text, "leave it out, or take a model whose template does")
        chat: list[dict[str, Any]] = [{"role": "system", "content": spec.system}, {"role": "user", "content": "hello"}]
        if spec.system and spec.chat is not False and _left_out(chat, 0, tokenizer, self.template):
            text = "data.system is set, but the tokenizer's chat template leaves system messages out"
            raise problem(Where(path="$.data.system"), text, "write it into the prompts, or leave it out")

    @property
    def takes_tools(self) -> bool:
        """True where the chat template reads tools."""
        return "tools" in self.names

    def of_prompt(self, value: Any) -> Conversation:
        """A prompt column's value: plain text, or messages (text is wrapped as a user's turn where chats are on)."""
        if isinstance(value, str):
            if not self.on and self._spec.system is not None:
                raise ValueError("data.system needs chat messages, and data.chat is false: the prompt is plain text")
            return self.with_system([{"role": "user", "content": value}]) if self.on else value
        return self.with_system(self.messages(value))

    def check_question(self, value: Any) -> None:
        """Raises ValueError for a prompt of the data that asks nothing: an empty one, or one that ends in an answer."""
        if value == "":
            raise ValueError("the prompt is empty")
        last = value[-1] if isinstance(value, list) and value else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            text = "a prompt ends before the assistant answers: leave its last message out"
            raise Misplaced(f"[{len(value) - 1}].role", text)

    def messages(self, value: Any) -> list[dict[str, Any]]:
        """A value as checked messages. Raises ValueError, also for a role that the template leaves out."""
        chat = check_messages(value, self.names)
        for i, message in enumerate(chat):
            role, first = message["role"], i == 0
            if (role, first) in self._rendered or not message.get("content") or not self._tokenizer.chat_template:
                continue
            if _left_out(chat, i, self._tokenizer, self.template):
                text = f"the tokenizer's chat template leaves messages of the role {role!r} out"
                raise Misplaced(f"[{i}].role", f"{text}: give it a role that the template renders, or delete it")
            self._rendered.add((role, first))
        return chat

    def with_system(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages after the data set's system message, where they have none of their own."""
        if self._spec.system is None or (messages and messages[0].get("role") == "system"):
            return list(messages)
        return [{"role": "system", "content": self._spec.system}, *messages]

    def with_tools(self, tools: Any) -> Template:
        """The template's arguments for a row: its own tools take the place of the run's. Raises ValueError."""
        own = check_tools(tools)
        return self.template if own is None else Template(self.template.args, own)
