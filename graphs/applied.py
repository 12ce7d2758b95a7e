"""The `apply` entries of a graph: the user's own advantage steps and loss terms, and what each is called with."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, assert_never

from msgspec import Struct

from realgraph.graphs.maths import ApplyTerm
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, Train
from realgraph.graphs.steps import ApplyStep


class Applied(Struct, frozen=True):
    """One `apply` entry."""

    path: str  # of the entry, in YAML
    call: str  # that the entry stands in
    entry: str  # its name
    kind: Literal["step", "term"]
    fn: str  # module:function
    args: dict[str, Any]  # keywords, as they are
    reads: tuple[str, ...]  # the keys that the function may look up in the batch
    outputs: tuple[str, ...] = ()  # of the forward pass that a loss term may use; a step has none

    @property
    def positional(self) -> tuple[str, str]:
        """The names of the arguments before its keywords, as the documentation has them."""
        return ("batch", "running") if self.kind == "step" else ("batch", "outputs")


def applied_of(calls: Mapping[str, ModelCall]) -> Iterator[Applied]:
    """Every `apply` entry of these calls, in their order."""
    for name, call in calls.items():
        match call:
            case Advantage(steps=steps):
                for entry, step in steps.items():
                    if isinstance(step, ApplyStep):
                        path = f"$.calls.{name}.steps.{entry}"
                        yield Applied(path, name, entry, "step", step.fn, step.args, step_keys(call, step))
            case Train(loss=loss):
                for entry, term in loss.terms.items():
                    if isinstance(term, ApplyTerm):
                        path = f"$.calls.{name}.loss.terms.{entry}"
                        yield Applied(path, name, entry, "term", term.fn, term.args, term.keys, term.outputs)
            case Generate() | Inference() | Function():
                pass
            case _:
                assert_never(call)


def step_keys(call: Advantage, step: ApplyStep) -> tuple[str, ...]:
    """The keys that a step's function may look up: what its call and the step itself declare."""
    return tuple(dict.fromkeys((*call.reads, *step.reads)))
