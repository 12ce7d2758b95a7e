"""Functions of real runs: what runs at once."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import GRPO, finish, home, records, write_run

__all__ = ["home"]

GROUPS, SIZE = 16, 2
TOGETHER = '''
import asyncio

begun = 0
met = asyncio.Event()


async def score(text, answer):
    """1 where all samples of a step have begun to be scored before one of them ends, else 0."""
    global begun
    begun += 1
    if begun == {samples}:
        met.set()
    if text in ("", "I do not know.", answer):  # as it is tried with before the run
        return 1.0
    try:
        await asyncio.wait_for(met.wait(), 60)
    except TimeoutError:
        return 0.0
    return 1.0
'''


@pytest.mark.parametrize("staleness", [0, 1])
def test_coroutines_of_all_groups_of_a_worker_run_at_once(home: Path, staleness: int) -> None:
    """In one process, though groups end at different times."""
    (home / "together.py").write_text(TOGETHER.format(samples=GROUPS * SIZE))
    own: dict[str, Any] = {
        "cluster": {"devices": 1},
        "batch": {"groups": GROUPS, "max_new_tokens": 40},
        "params": {"group_size": SIZE, "minibatches": 1},
        "calls": {"reward": {"fn": "together:score", "timeout_seconds": 90.0}},
        "staleness": staleness,
        "steps": 1,
    }
    name = f"together-{staleness}"
    finish(home, "run", str(write_run(home, name, GRPO, own)), name=name)
    (step,) = records(home / name)
    assert step["metrics"]["reward/reward"] == 1.0
    assert step["metrics"]["batch/samples"] == GROUPS * SIZE
