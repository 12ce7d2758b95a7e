"""Checks of a chat template's arguments without the template: names and values. No network, no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realgraph.graphs.yaml.document import child
from realgraph.runtime.job.job import DataSpec

# What the runtime itself gives the template, and why it is set elsewhere.
_GIVEN = {
    "messages": "the data's column holds the messages",
    "conversation": "the data's column holds the conversation",
    "tools": "write data.tools, or give the data a column `tools`",
    "add_generation_prompt": "prompts have it, and whole samples do not",
    "chat_template": "the template is the tokenizer's: change it in the model's folder",
}
_OPTIONS = (  # of transformers' `apply_chat_template`, beside the template's own arguments
    *("tokenize", "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)

Mistake = tuple[str, str, str]  # YAML path, text, hint


def template_mistakes(data: DataSpec, path: str) -> Iterator[Mistake]:
    """Mistakes of `template_args` and `tools` of the data set at `path`."""
    parent = f"{path}.template_args"
    for name, value in data.template_args.items():
        at = child(parent, name)
        if name in _GIVEN:
            yield at, f"{name!r} is not an argument that can be set here", _GIVEN[name]
        elif name in _OPTIONS:
            yield at, f"{name!r} is an option of rendering, not an argument of a template", "leave it out"
        elif not name.isidentifier():
            yield at, f"{name!r} can't be the name of an argument", "use letters, digits and _, as in enable_thinking"
        yield from _values(value, at)
    for i, tool in enumerate(data.tools or ()):
        if not tool:
            yield f"{path}.tools[{i}]", "a tool without a description", "write its JSON schema, or leave it out"
        yield from _values(tool, f"{path}.tools[{i}]")


def _values(value: Any, path: str) -> Iterator[Mistake]:
    """Parts of a value that are no JSON; numbers that JSON lacks are refused where files are read."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield from _values(item, child(path, str(key)))
        case str():
            pass
        case Sequence():
            for i, item in enumerate(value):
                yield from _values(item, child(path, i))
        case bool() | int() | float() | None:
            pass
        case _:
            yield (
                path,
                f"a {type(value).__name__} is not a JSON value",
                "use text, numbers, true, false, null, lists, mappings",
            )
