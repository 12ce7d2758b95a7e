"""A real server behaves as the client expects: every check of the suite that the stand-in passes too."""

import pytest

from tests.sglang_conformance.checks import CHECKS
from tests.sglang_conformance.subject import Check, Subject, run


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, subject: Subject) -> None:
    run(check, subject)
