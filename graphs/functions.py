"""The built-in functions of `kind: function` calls, by name: purpose and arguments. The runtime implements them."""

from typing import Literal

from msgspec import Struct

BUILTINS: dict[str, str] = {
    "exact_match": "1.0 where the text, without surrounding space, is the answer; keys: text, answer",
    "last_number": "1.0 where the last number in the text equals the answer's last number; keys: text, answer",
    "format_match": "1.0 where the text matches a regular expression; keys: text; args: pattern",
    "length": "number of characters of the text; keys: text",
    "best_of": "1.0 for the k best samples of a group that reach a least reward, else 0.0; keys: reward; over: group",
    "reward_spread": "whether the rewards of a group differ by more than a least spread; keys: reward; over: group",
}


class Signature(Struct, frozen=True):
    """Keys and arguments that a built-in function needs, those it may have, and over what it works."""

    keys: tuple[str, ...]
    over: Literal["sample", "group", "batch"]
    args: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def takes(self) -> tuple[str, ...]:
        return self.keys + self.args + self.optional


SIGNATURES: dict[str, Signature] = {
    "exact_match": Signature(keys=("text", "answer"), over="sample"),
    "last_number": Signature(keys=("text", "answer"), over="sample"),
    "format_match": Signature(keys=("text",), args=("pattern",), over="sample"),
    "length": Signature(keys=("text",), over="sample"),
    "best_of": Signature(keys=("reward",), optional=("k", "least"), over="group"),
    "reward_spread": Signature(keys=("reward",), optional=("least",), over="group"),
}
