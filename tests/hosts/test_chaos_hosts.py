"""Drawn faults of real runs over two hosts. `python -m benchmarks.chaos_hosts` draws many more."""

from pathlib import Path

import pytest

from benchmarks.chaos_checks import Trained
from benchmarks.chaos_hosts import drawn, run, uninterrupted
from benchmarks.chaos_settings import chaos_home
from tests.namespaces import why_not

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
SEED, CASES = 3, 8


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    folder = tmp_path_factory.mktemp("chaos")
    chaos_home(folder / "source")
    return folder, uninterrupted(folder / "source", folder)


@pytest.mark.parametrize("index", range(CASES))
def test_a_drawn_fault_breaks_no_promise(work: tuple[Path, dict[str, Trained]], index: int) -> None:
    folder, references = work
    case = drawn(SEED, index)
    assert not run(case, folder / "source", folder, references[case.setting]).broken, case.evidence
