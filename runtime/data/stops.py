"""The ends of a sample: ends of sequence, the end of an assistant's turn, and what a generate call asks for. No
torch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Generate
from realgraph.runtime.data.chats import turn_end_token
from realgraph.runtime.data.tokenize import BARE, Template, Tokenizer, special_tokens
from realgraph.runtime.job.job import DataSpec

GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"


class Stops(NamedTuple):
    """Tokens that end a sample and belong to it, and texts."""

    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


def says_stop(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """The newest text of `tokens` holds a stop string. A character may take four tokens, so the tail is cut wide."""
    text = decode(tokens[max(0, len(tokens) - 4 * max(map(len, stops)) - 8) :])
    return any(stop in text for stop in stops)


def json_object(file: Path) -> dict[str, Any]:
    """The contents of a JSON file of a model's folder. Raises ConfigError for one that is no JSON object."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(file, f"can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise _refuse(file, "is not a JSON object")
    return content


def model_ends(folder: Path) -> frozenset[int]:
    """`eos_token_id`, one or several, of a model's generation_config.json; where it names none, of its config.json.

    Raises ConfigError for a file that is no JSON object, and for an end that is no token id.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        file = folder / name
        if not file.is_file():
            continue
        ends = json_object(file).get("eos_token_id")
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(isinstance(end, int) and not isinstance(end, bool) for end in listed):
            raise _refuse(file, f"eos_token_id is {ends!r}: expected a token id, or a list of them")
        if listed:
            return frozenset(listed)
    return frozenset()


def end_tokens(tokenizer: Tokenizer, folder: Path | None, chat: Template | None = BARE) -> frozenset[int]:
    """Every token that ends a sample by itself: the tokenizer's end of sequence, those of the model's generation
    config, and (unless `chat` is None: prompts are plain text) the one that ends a turn in the chat template.

    Raises ConfigError.
    """
    ends = set(model_ends(folder)) if folder is not None else set()
    if isinstance(tokenizer.eos_token_id, int):
        ends.add(tokenizer.eos_token_id)
    turn_end = turn_end_token(tokenizer, chat) if chat is not None else None
    return frozenset(ends if turn_end is None else {*ends, turn_end})


def stops_of(name: str, call: Generate, data: DataSpec, tokenizer: Tokenizer, folder: Path | None) -> Stops:
    """Everything that ends a sample of the generate call `name`. folder: of the model, None where it is not at hand.

    Raises ConfigError.
    """
    asked = asked_stops(call.stop, tokenizer, Where(path=f"$.calls.{name}.stop"))
    chat = None if data.chat is False else Template(data.template_args, data.tools)
    return Stops(asked.tokens | end_tokens(tokenizer, folder, chat), asked.strings)


def asked_stops(stop: Sequence[str], tokenizer: Tokenizer, where: Where) -> Stops:
    """`stop` of a generate call, whose place is `where`: a special token ends a sample as a token, for a sample's text
    leaves it out; other texts end it where they appear.

    Raises ConfigError for what could never end a sample, or would end each at once.
    """
    special = special_tokens(tokenizer)
    problems = []
    for i, text in enumerate(stop):
        at = Where(where.file, where.line, f"{where.path}[{i}]")
        within = [token for token in special if token in text and token != text]
        if not text:
            problems.append(Problem(at, "an empty text would end every sample at once", "leave it out", "stop"))
        elif within and text not in special:
            said = f"{text!r} holds the special token {within[0]!r} among other text, and so never appears in a text"
            hint = f"write {within[0]!r} alone: it then ends the sample as a token"
            problems.append(Problem(at, said, hint, "stop"))
    if problems:
        raise ConfigError(problems)
    tokens = frozenset(special[text] for text in stop if text in special)
    return Stops(tokens, tuple(text for text in stop if text not in special))


def _refuse(file: Path, text: str) -> ConfigError:
    return ConfigError([Problem(Where(str(file)), text, "it comes with the model: take it whole again", "model")])
