"""The faults of `benchmarks.chaos_async` to engines that are replaced: a real run whose replacement is killed while it
takes its weights keeps every promise."""

import random
from pathlib import Path

import pytest

from benchmarks.chaos import Case, Place, run_case
from benchmarks.chaos_engines import KINDS, draw
from benchmarks.chaos_faults import Fault
from benchmarks.chaos_settings import REPLACED, chaos_home

pytest.importorskip("torch")


def test_every_kind_of_fault_is_drawn_and_leaves_a_replacement_to_join() -> None:
    rng = random.Random(1)
    assert {draw(rng).signal for _ in range(200)} == set(KINDS)
    for setting in REPLACED.values():
        limit = setting.run()["rollout"]["replacements"]
        assert all(len(kind.split(", ")) <= limit for kind in KINDS)


@pytest.mark.slow
def test_a_replacement_that_is_killed_in_its_handover_is_replaced(tmp_path: Path) -> None:
    setting = next(iter(REPLACED.values()))
    fault = Fault("KILL, KILL in handover", "engine", "steps", 0.0, 2)
    case = Case(0, setting.name, fault)
    run_case(case, Place(chaos_home(tmp_path / "source"), tmp_path / "case", setting), None, random.Random(1))
    assert case.broken == [], case.evidence
    assert not case.missed
