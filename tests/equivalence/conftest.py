"""Processes and models that all tests of the package share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equivalence.layouts import EIGHT, LAYOUTS
from tests.equivalence.training import save_models
from tests.ranks import RankProcesses


@pytest.fixture(scope="session")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(4, tuple(LAYOUTS.values()))
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def eight() -> Iterator[RankProcesses]:
    processes = RankProcesses(8, tuple(EIGHT.values()))
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))
