"""All checks, one function for each behaviour: `check(subject)`, in any order; tests run them one by one with `run`."""

from tests.sglang_conformance import aborts, generation, pauses, questions, weights
from tests.sglang_conformance.subject import Check

CHECKS: tuple[Check, ...] = (
    *generation.CHECKS,
    *aborts.CHECKS,
    *pauses.CHECKS,
    *weights.CHECKS,
    *questions.CHECKS,
)
