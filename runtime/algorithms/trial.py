"""The user's own steps and terms tried on a small made-up batch, in a functions' subprocess, before a run starts.

A real call of the function on real tensors: what it looks up, what it returns and of which shape are those of the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, MASK, TOKENS, VERSIONS, DType, KeyType
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import Advantage, Train
from realgraph.runtime.algorithms import advantages, losses
from realgraph.runtime.algorithms.applied import AppliedError
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.store.assemble import TORCH_DTYPES

PROMPT_TOKENS = 2  # responses of 1 to 4 follow
SEED = 0


class Trial(Struct, frozen=True):
    """One try of an `apply` entry."""

    call: Advantage | Train  # an advantage call up to the entry, or a train call with it as its only term
    entry: str
    fns: dict[str, str]  # path of `fn` -> function, of the call's entries
    keys: dict[str, KeyType]  # all that the call reads
    group_sizes: tuple[int, ...]  # of the made-up batch, such as a run may have
    dtype: str  # of the trained role
    folder: str  # of the user's functions


def try_entry(trial: dict[str, Any]) -> dict[str, str]:
    """Run one `apply` entry: `problem` says why it can't be run, `note` what a person should know of it; else ''."""
    given = msgspec.convert(trial, Trial)
    batch = made_up(given.keys, given.group_sizes)
    try:
        loaded = load_applied(given.fns, given.folder)
        note = _tried(given, batch, loaded)
        _refuse_changes(given, batch)
    except ConfigError as error:
        return {"problem": error.problems[0].text, "note": ""}
    except AppliedError as error:
        return {"problem": str(error), "note": ""}
    return {"problem": "", "note": note}


def _refuse_changes(trial: Trial, batch: Packed) -> None:
    """A function that changes the batch changes it for the terms after it. Raises AppliedError."""
    before = made_up(trial.keys, trial.group_sizes)
    pairs = {"batch.tokens": (before.tokens, batch.tokens), "batch.mask": (before.mask, batch.mask)}
    pairs |= {f"the key {name!r}": (before.token_keys[name], batch.token_keys[name]) for name in batch.token_keys}
    pairs |= {f"the key {name!r}": (before.sample_keys[name], batch.sample_keys[name]) for name in batch.sample_keys}
    for name, (old, new) in pairs.items():
        if not torch.equal(old, new):
            fn = list(trial.fns.values())[-1]
            raise AppliedError(f"{trial.entry!r}: {fn} changes {name} in place: return a new tensor instead")


def _tried(trial: Trial, batch: Packed, loaded: Mapping[str, Any]) -> str:
    match trial.call:
        case Advantage():
            try:
                advantages.compute(trial.call, batch, {}, loaded)
            except AppliedError:
                raise
            except ValueError as error:  # made-up numbers may have no finite result; real ones are checked in the run
                return f"on made-up numbers {error}"
            return ""
        case Train(loss=loss):
            return _try_term(loss, batch, loaded, trial)


def _try_term(loss: Loss, batch: Packed, loaded: Mapping[str, Any], trial: Trial) -> str:
    outputs = _outputs(batch, torch.float64 if trial.dtype == "float64" else torch.float32)
    value, _ = losses.evaluate(loss, batch, outputs, losses.denominator(loss, batch), loaded)
    every = (outputs.logprobs, outputs.entropy, outputs.values, outputs.scores)
    leaves = [tensor for tensor in every if tensor is not None]
    if not value.requires_grad:
        return "its loss does not depend on the model's outputs: it has no gradient and trains nothing"
    try:
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    except RuntimeError as error:  # such as a tensor that the function changed in place
        fn = next(iter(trial.fns.values()))
        raise AppliedError(f"term {trial.entry!r}: {fn} can't be differentiated: {error}") from error
    if not bool(value.isfinite()):
        return f"on made-up numbers its loss is {value.item()}"
    if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
        return "on made-up numbers its gradient is not finite: torch.where keeps NaN of the branch that is not taken"
    return ""


def _outputs(batch: Packed, dtype: torch.dtype) -> Outputs:
    random = torch.Generator().manual_seed(SEED + 1)

    def numbers(n: int) -> Tensor:
        return torch.rand(n, generator=random, dtype=dtype)

    t, n = batch.n_tokens, batch.n_samples
    tensors = (-numbers(t) - 0.1, numbers(t) + 0.1, numbers(t), numbers(n))
    return Outputs(*(tensor.requires_grad_() for tensor in tensors))


def made_up(keys: Mapping[str, KeyType], group_sizes: Sequence[int]) -> Packed:
    """A batch of groups with so many samples each, and numbers for every numeric key. Samples differ in length, as real
    ones do."""
    n = sum(group_sizes)
    lengths = tuple(PROMPT_TOKENS + 1 + i % 4 for i in range(n))
    random = torch.Generator().manual_seed(SEED)
    token_keys: dict[str, Tensor] = {}
    sample_keys: dict[str, Tensor] = {}
    for name, key in keys.items():
        if name in (TOKENS, MASK) or key.dtype in ("text", "json", "tokens", "experts"):
            continue
        if key.level == "token":
            token_keys[name] = _numbers(name, key, sum(lengths), random)
        elif key.level == "group":
            sample_keys[name] = _numbers(name, key, len(group_sizes), random).repeat_interleave(
                torch.tensor(group_sizes)
            )
        else:
            sample_keys[name] = _numbers(name, key, n, random)
    return Packed(
        tokens=torch.randint(0, 100, (sum(lengths),), generator=random),
        lengths=lengths,
        mask=torch.cat([torch.arange(length) >= PROMPT_TOKENS for length in lengths]),
        samples=tuple(range(n)),
        groups=tuple(group for group, size in enumerate(group_sizes) for _ in range(size)),
        token_keys=token_keys,
        sample_keys=sample_keys,
    )


def _numbers(name: str, key: KeyType, n: int, random: torch.Generator) -> Tensor:
    """Values that a key of this type and meaning may have: log-probabilities are negative, versions 0."""
    numbers = torch.rand(n, generator=random, dtype=torch.float64)
    if name == VERSIONS:
        numbers = numbers * 0
    elif name == BEHAVIOUR_LOGPROBS or key.logprobs is not None:
        numbers = -numbers - 0.1
    return _as(numbers, key.dtype)


def _as(numbers: Tensor, dtype: DType) -> Tensor:
    if dtype == "bool":
        return numbers > 0.5
    return (numbers * 4 if dtype.startswith("int") else numbers).to(TORCH_DTYPES[dtype])
