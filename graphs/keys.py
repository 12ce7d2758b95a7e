"""Types of the keys that flow along the edges of a graph: level, dtype, and what a log-probability means."""

import sys
from typing import Literal

from msgspec import Struct

Level = Literal["group", "sample", "token"]
DType = Literal["bool", "int32", "int64", "float32", "float64", "tokens", "text", "json", "experts"]

LEVELS: tuple[Level, ...] = ("group", "sample", "token")
# those that data and functions may have
DTYPES: tuple[DType, ...] = ("bool", "int32", "int64", "float32", "float64", "tokens", "text", "json")
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_RANGES: dict[str, tuple[float, float]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float32": (-_FLOAT32_MAX, _FLOAT32_MAX),
    "float64": (-sys.float_info.max, sys.float_info.max),
}


class LogprobSemantics(Struct, frozen=True):
    """The distribution that log-probabilities are of."""

    role: str  # whose
    temperature: float
    behaviour: bool = False  # at sampling time (one version per token), else by the role's weights of a step
    truncated: bool = False  # top-p or top-k renormalised it over part of the vocabulary


class KeyType(Struct, frozen=True):
    """One value a group, a sample or a token. `tokens`, `text` and `json` are ragged: one value is one item.
    `experts` is of a token: the numbers of those that it went to, [layers of experts, experts a token]."""

    level: Level
    dtype: DType
    logprobs: LogprobSemantics | None = None

    def __str__(self) -> str:
        return f"{self.level} {self.dtype}"


def fits(value: int | float, dtype: DType) -> bool:
    """True of a finite number within the range of a numeric dtype."""
    least, most = _RANGES[dtype]
    return least <= value <= most


def parse_key_type(text: str) -> KeyType:
    """`group tokens` -> KeyType. Raises ValueError naming the known words."""
    words = text.split()
    if len(words) != 2:
        raise ValueError(f"{text!r} is not a key type: expected '<level> <dtype>', such as 'sample float32'")
    for level in LEVELS:
        for dtype in DTYPES:
            if words == [level, dtype]:
                return KeyType(level, dtype)
    raise ValueError(f"{text!r} is not a key type: levels are {', '.join(LEVELS)}; dtypes are {', '.join(DTYPES)}")


# The keys a generate call writes. `tokens` holds prompt and response; token keys have its length: entry t is about
# token t given those before it. `mask` is true where the policy sampled the token.
TOKENS = "tokens"
MASK = "mask"
BEHAVIOUR_LOGPROBS = "behaviour_logprobs"
VERSIONS = "versions"
TEXT = "text"
FINISHED = "finished"  # false where the sample was cut at max_new_tokens
GENERATED: dict[str, KeyType] = {
    TOKENS: KeyType("sample", "tokens"),
    MASK: KeyType("token", "bool"),
    BEHAVIOUR_LOGPROBS: KeyType("token", "float32"),
    VERSIONS: KeyType("token", "int32"),
    TEXT: KeyType("sample", "text"),
    FINISHED: KeyType("sample", "bool"),
}
EVALUATED = (TEXT, FINISHED)  # those that functions get of a held-out sample
# Those of a call that makes one sample for a whole group: values of the group.
GENERATED_OF_GROUP: dict[str, KeyType] = {
    TOKENS: KeyType("group", "tokens"),
    TEXT: KeyType("group", "text"),
    FINISHED: KeyType("group", "bool"),
}
# Of sequences of the data beside generated samples (`samples: data`): one a group, whose mask has a value a token.
DATA = "data"
OF_DATA: dict[str, KeyType] = {
    f"{DATA}.{TOKENS}": KeyType("group", "tokens"),
    f"{DATA}.{MASK}": KeyType("group", "bool"),
}
OWN_TOKENS = KeyType("sample", "tokens")
# Of a role with `routing_replay` a generate call writes this key, too.
ROUTES = "routes"
ROUTES_KEY = KeyType("token", "experts")


def own_tokens(role: str) -> str:
    """The key of a sample as the tokenizer of `role` cuts it, for calls with `tokenizer: own`."""
    return f"tokens_of_{role}"


def is_prompt(key: KeyType) -> bool:
    """True where functions get the key as text: it is a prompt's tokens."""
    return key.level == "group" and key.dtype == "tokens"


def ids_keyword(key: str) -> str:
    """The keyword under which a function gets the token ids of a prompt that it reads."""
    return f"{key}_ids"


# --- what a reader of a key accepts -----------------------------------------------------------------------------------

Meaning = Literal["", "logprobs", "values", "scores", "advantages"]


class Requirement(Struct, frozen=True):
    """The types that a reader accepts."""

    levels: tuple[Level, ...]
    dtypes: tuple[DType, ...]
    meaning: Meaning = ""  # of the numbers, where an inference call wrote them

    def accepts(self, key: KeyType) -> bool:
        return key.level in self.levels and key.dtype in self.dtypes

    def __str__(self) -> str:
        words = {_NUMBERS: "numbers", _FLOATS: "float32"}.get(self.dtypes, " or ".join(self.dtypes))
        return f"{' or '.join(self.levels)} {words}"


_NUMBERS: tuple[DType, ...] = ("float32", "float64", "int32", "int64", "bool")
_FLOATS: tuple[DType, ...] = ("float32", "float64")
ANY_TYPE = Requirement(
    ("group", "sample", "token"), ("bool", "int32", "int64", "float32", "float64", "tokens", "text", "json")
)
PROMPT_TYPE = Requirement(("group",), ("tokens",))
LATER_PROMPT_TYPE = Requirement(("group", "sample"), ("tokens", "text"))
SEQUENCE_TYPE = Requirement(("sample",), ("tokens",))
MASK_TYPE = Requirement(("token",), ("bool",))
DATA_SEQUENCE_TYPE = Requirement(("group",), ("tokens",))
DATA_MASK_TYPE = Requirement(("group",), ("bool",))
VERSIONS_TYPE = Requirement(("token",), ("int32",))
ROUTES_TYPE = Requirement(("token",), ("experts",))
REWARD_TYPE = Requirement(("sample", "token"), _NUMBERS)
WEIGHT_TYPE = Requirement(("sample", "token"), _FLOATS)
BASELINE_TYPE = Requirement(("group", "sample", "token"), _FLOATS)
TOKEN_FLOAT_TYPE = Requirement(("token",), _FLOATS)
LOGPROBS_TYPE = Requirement(("token",), _FLOATS, "logprobs")
VALUES_TYPE = Requirement(("token",), _FLOATS, "values")
TENSOR_TYPE = Requirement(("group", "sample", "token"), _NUMBERS)
