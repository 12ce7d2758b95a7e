"""Runs over two hosts of which one does not see the run directory: it has an empty file system at its place."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broken_runs import own
from tests.host_runs import Hosts
from tests.namespaces import Network, network, why_not
from tests.runs import GRPO, finish, home, numbers, records, write_run

__all__ = ["home", "own"]

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
STEPS: dict[str, Any] = {"steps": 4, "checkpoint": {"every": 2}}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    with network(2) as made:
        yield made


def test_dp(two: Network, own: Path) -> None:
    running = Hosts(own, STEPS, network=two, apart="b")
    print(running.ends(0))
