"""`when`: takes out of a graph what is switched off, and what only made sense with it. Judges only the switches."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import assert_never

from msgspec import structs

from realgraph.graphs.errors import Problem, Where
from realgraph.graphs.infer import Lost, Read, call_writes, step_reads, term_reads
from realgraph.graphs.maths import Term
from realgraph.graphs.spec import Advantage, Function, Generate, GraphSpec, Inference, ModelCall, Switch, Train, role_of
from realgraph.graphs.steps import Step

_FALSE_WORDS = ("false", "no", "off", "0", "none", "null", "~")


def switch_off(spec: GraphSpec) -> tuple[GraphSpec, dict[str, Lost]]:
    """The graph that is left, and the keys that nobody writes any more.

    A role switched off takes its calls along; a key lost takes along the loss terms and advantage steps that read it,
    but not a KL that somebody gave a coefficient: switched off and asked for at once, it is for a rule to refuse.
    """
    models = {name: role for name, role in spec.models.items() if role.when}
    off_roles = spec.models.keys() - models.keys()
    calls = {name: call for name, call in spec.calls.items() if call.when and role_of(call) not in off_roles}
    left = structs.replace(spec, models=models, calls=calls)
    kept = {write.key for name in calls for write in call_writes(name, left)} | spec.inputs.keys()
    lost = {
        write.key: Lost(name, f"calls.{name}.when" if not call.when else f"models.{role_of(call)}.when")
        for name, call in spec.calls.items()
        if name not in calls
        for write in call_writes(name, spec)
        if write.key not in kept
    }
    live = {name: _without(call, lost) for name, call in calls.items()}
    return structs.replace(left, calls=live), lost


def switch_problems(spec: GraphSpec, where: Callable[[str], Where]) -> Iterator[Problem]:
    """A switch that is the text 'false' would be on: say so instead of guessing."""
    entries: list[tuple[str, Switch]] = [(f"$.models.{name}.when", role.when) for name, role in spec.models.items()]
    entries += [(f"$.calls.{name}.when", call.when) for name, call in spec.calls.items()]
    for path, when in entries:
        if isinstance(when, str) and when.strip().lower() in _FALSE_WORDS:
            hint = "write false without quotes; false, 0, null and the empty text switch off"
            yield Problem(where(path), f"{when!r} is text, and any text switches on", hint, "switch_problems")


def _falls(entry: Step | Term, reads: Sequence[Read], lost: Container[str]) -> bool:
    wanted = entry.switched_by_coefficient and entry.coefficient != 0
    return not wanted and any(read.key in lost for read in reads)


def _without(call: ModelCall, lost: dict[str, Lost]) -> ModelCall:
    """The call without the terms, steps and rewards that read lost keys (all rewards lost: they stay, for a rule)."""
    match call:
        case Advantage(steps=steps, reads=reads):
            kept_steps = {
                entry: step
                for entry, step in steps.items()
                if step is not None and not _falls(step, step_reads("", entry, step), lost)
            }
            kept_reads = tuple(key for key in reads if key not in lost)
            return structs.replace(call, steps=kept_steps, reads=kept_reads or reads)
        case Train(loss=loss):
            kept_terms = {
                entry: term for entry, term in loss.terms.items() if not _falls(term, term_reads("", entry, term), lost)
            }
            return structs.replace(call, loss=structs.replace(loss, terms=kept_terms))
        case Generate() | Inference() | Function():
            return call
        case _:
            assert_never(call)
