"""The user's own advantage steps and loss terms: what they get, what they must return, how they fail. Worker side.

A function sees the batch with the keys that its entry declares, and of the outputs those that it declares: what it
looks up beside them is an error that says so, in the first try as in the run.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from realgraph.graphs.keys import MASK, TOKENS
from realgraph.graphs.maths import OUTPUTS
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.functions.user_errors import error_text, user_place


class AppliedError(ValueError):
    """The function of an `apply` entry failed or returned what it must not. The text names both."""


class UndeclaredKeyError(KeyError):
    """A function looked up a key that its entry does not declare."""

    def __str__(self) -> str:
        return str(self.args[0])


class UndeclaredOutputError(AttributeError):
    """A function asked for an output that its entry does not declare."""


class DeclaredKeys(Mapping[str, Tensor]):
    """The keys of a batch that a function may look up. declared: by the entry, at any level."""

    def __init__(self, keys: Mapping[str, Tensor], declared: Sequence[str]) -> None:
        self._keys, self._declared = {name: keys[name] for name in declared if name in keys}, tuple(declared)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._keys:
            return self._keys[name]
        if name in (TOKENS, MASK):
            raise UndeclaredKeyError(f"looks up {name!r} as a key: it is batch.{name}")
        listed = ", ".join(self._declared) or "none"
        if name in self._declared:
            raise UndeclaredKeyError(
                f"looks up {name!r} at the wrong level: batch.key({name!r}) gives it for each token"
            )
        raise UndeclaredKeyError(f"looks up the key {name!r}, which `reads` does not declare (declared: {listed})")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class DeclaredOutputs:
    """The outputs of a forward pass that a loss term may use; see `Outputs`."""

    def __init__(self, outputs: Outputs, declared: Sequence[str]) -> None:
        self._outputs, self._declared = outputs, tuple(declared)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in OUTPUTS:
            raise AttributeError(f"outputs have no {name!r}: they have {', '.join(OUTPUTS)}")
        if name not in self._declared:
            listed = ", ".join(self._declared)
            text = f"uses outputs.{name}, which `reads` does not declare (declared: {listed})"
            raise UndeclaredOutputError(text)
        value: Tensor | None = getattr(self._outputs, name)
        if value is None:
            raise UndeclaredOutputError(f"uses outputs.{name}, which the forward pass did not give")
        return value


@dataclass(frozen=True)
class AppliedCall:
    """A function of an `apply` entry, and its arguments."""

    what: str  # `step 'half'` or `term 'more'`
    fn: str  # module:function
    function: Callable[..., Any]
    keys: tuple[str, ...]  # that it may look up
    args: Mapping[str, Any]  # keywords, as they are

    def fail(self, text: str) -> AppliedError:
        return AppliedError(f"{self.what}: {self.fn} {text}")


def apply_step(call: AppliedCall, batch: Packed, running: Tensor) -> Tensor:
    """The new running quantity: [N] or [T] float64. Raises AppliedError."""
    result = _called(call, batch, running)
    n, t = batch.n_samples, batch.n_tokens
    if result.shape not in ((n,), (t,)):
        raise call.fail(f"returned the shape {_shape(result)}, expected {_per(n, 'sample')} or {_per(t, 'token')}")
    return result.detach().double()


def apply_term(call: AppliedCall, batch: Packed, outputs: Outputs, declared: Sequence[str]) -> Tensor:
    """A loss per token [T], floating. declared: the outputs that the function may use. Raises AppliedError."""
    result = _called(call, batch, DeclaredOutputs(outputs, declared))
    if result.shape != (batch.n_tokens,):
        expected = f"a loss per token is needed, {_per(batch.n_tokens, 'token')}"
        raise call.fail(f"returned the shape {_shape(result)}; {expected}")
    if not result.is_floating_point():
        raise call.fail(f"returned {result.dtype}; a loss is a floating-point number per token")
    return result


def _called(call: AppliedCall, batch: Packed, second: object) -> Tensor:
    """Call the function: a real tensor on the batch's device. Raises AppliedError."""
    seen = replace(
        batch,
        token_keys=DeclaredKeys(batch.token_keys, call.keys),
        sample_keys=DeclaredKeys(batch.sample_keys, call.keys),
    )
    try:
        result = call.function(seen, second, **call.args)
    except (UndeclaredKeyError, UndeclaredOutputError) as error:
        place = user_place(error)
        raise call.fail(f"{error} ({place})" if place else str(error)) from error
    except Exception as error:  # whatever the user's function raises
        raise call.fail(f"raised {error_text(error)}") from error
    if inspect.iscoroutine(result):
        result.close()
        raise call.fail("is async, and a step or term is a plain function")
    if not isinstance(result, Tensor):
        raise call.fail(f"returned {_kind(result)}; expected a tensor")
    if result.is_complex():
        raise call.fail(f"returned {result.dtype}; expected real numbers")
    if result.device != batch.mask.device:
        raise call.fail(f"returned a tensor on {result.device}; the batch is on {batch.mask.device}")
    return result


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _per(count: int, what: str) -> str:
    return f"({count},), one a {what}"
