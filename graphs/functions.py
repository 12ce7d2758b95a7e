"""Functions of `kind: function` calls: the built-in ones by name, with purpose and arguments (the runtime implements
them), and those that leave groups or samples out of training, since they write `keep`."""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from realgraph.graphs.keys import REWARD_TYPE
from realgraph.graphs.spec import Advantage, Function, Inference, ModelCall, Train

USERS_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")  # module:function
BUILTINS: dict[str, str] = {
    "exact_match": "1.0 where the text, without surrounding space, is the answer; keys: text, answer",
    "last_number": "1.0 where the last number in the text equals the answer's last number; keys: text, answer",
    "format_match": "1.0 where the text matches a regular expression; keys: text; args: pattern",
    "length": "number of characters of the text; keys: text",
    "fill_template": "the template with {prompt}, {text}, {answer} filled in; keys: any of these; args: template",
    "number_in": "the last number in the text, within [low, high]; low without one; keys: text; args: low, high",
    "best_of": "1.0 for the k best samples of a group that reach a least reward, else 0.0; keys: reward; over: group",
    "reward_spread": "whether the rewards of a group differ by more than a least spread; keys: reward; over: group",
}


class Signature(Struct, frozen=True):
    """Keys and arguments that a built-in function needs, those it may have, and over what it works."""

    keys: tuple[str, ...]
    over: Literal["sample", "group", "batch"]
    args: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    number: bool = True  # of what it gives; else a text

    @property
    def takes(self) -> tuple[str, ...]:
        return self.keys + self.args + self.optional


SIGNATURES: dict[str, Signature] = {
    "exact_match": Signature(keys=("text", "answer"), over="sample"),
    "last_number": Signature(keys=("text", "answer"), over="sample"),
    "format_match": Signature(keys=("text",), args=("pattern",), over="sample"),
    "length": Signature(keys=("text",), over="sample"),
    "fill_template": Signature(
        keys=(), args=("template",), optional=("prompt", "text", "answer"), over="sample", number=False
    ),
    "number_in": Signature(keys=("text",), args=("low", "high"), over="sample"),
    "best_of": Signature(keys=("reward",), optional=("k", "least"), over="group"),
    "reward_spread": Signature(keys=("reward",), optional=("least",), over="group"),
}

GATHERED = "gathered"  # no user's: a run adds it to a graph whose samples are its result
KEEP = "keep"  # a function that writes it filters: groups where it is one a group, else samples
KEEP_TYPES = ("group bool", "sample bool")


def sample_filter(calls: Mapping[str, ModelCall]) -> str:
    """The call that leaves samples of groups out; '' where none does."""
    for name, call in calls.items():
        if isinstance(call, Function) and call.writes.get(KEEP, "").split() == ["sample", "bool"]:
            return name
    return ""


def scoring_call(calls: Mapping[str, ModelCall], asked: str) -> str:
    """The call that scores held-out samples: as asked, else `reward`, or what writes an advantage's reward."""
    if asked or "reward" in calls:
        return asked or "reward"
    rewards = [call.reads[0] for call in calls.values() if isinstance(call, Advantage) and call.reads]
    writers = {
        key: name for name, call in calls.items() if isinstance(call, Function | Inference) for key in call.writes
    }
    return next((writers[key] for key in rewards if key in writers), "reward")


def judging_keys(calls: Mapping[str, ModelCall], name: str) -> tuple[str, ...]:
    """The keys by which evaluations can judge samples that `name` scores, the default first: what a model's head
    scores; of a function the numbers a sample that it writes, but `keep`, an advantage's reward before others."""
    call = calls.get(name)
    if isinstance(call, Inference):
        return call.writes if call.output == "scores" else ()
    types = {key: text.split() for key, text in call.writes.items()} if isinstance(call, Function) else {}
    numbers = [key for key, words in types.items() if words in [["sample", dtype] for dtype in REWARD_TYPE.dtypes]]
    rewards = [other.reads[0] for other in calls.values() if isinstance(other, Advantage) and other.reads]
    return tuple(dict.fromkeys(key for key in [*rewards, *numbers] if key in numbers and key != KEEP))


def comparing(calls: Mapping[str, ModelCall]) -> Iterator[str]:
    """The steps and loss terms, in words, that compare the samples of a group with each other."""
    for call in calls.values():
        if isinstance(call, Advantage):
            yield from (f"the step {name!r}" for name, step in call.steps.items() if step and step.compares_samples)
        elif isinstance(call, Train):
            yield from (f"the term {name!r}" for name, term in call.loss.terms.items() if term.needs_whole_groups)


def least_samples(calls: Mapping[str, ModelCall], samples_per_group: int) -> int:
    """The fewest samples that a group goes on with: as the filter says, or two where the samples of a group are
    compared; never more than it has."""
    call = calls.get(sample_filter(calls))
    if not isinstance(call, Function):
        return 1
    asked = call.min_samples or (2 if any(comparing(calls)) else 1)
    return min(asked, samples_per_group)


def name_hint(fn: str) -> str:
    """The hint for a file's path, a call or dots alone, such as `rewards/math.py:score`: the `module:function` that is
    meant. "" for anything else."""
    module, colon, function = fn.removesuffix("()").rpartition(":")
    if not colon:
        module, _, function = fn.removesuffix("()").rpartition(".")
    own = f"{module.removeprefix('./').removesuffix('.py').replace('/', '.')}:{function}"
    is_meant = USERS_OWN.fullmatch(own) and own != fn and function != "py"
    return f"did you mean {own!r}?" if is_meant else ""
