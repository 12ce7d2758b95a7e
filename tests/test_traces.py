"""Traces of a run: what it leaves in shared memory is seen, and what others leave there is not."""

from pathlib import Path
from uuid import uuid4

import pytest

from tests.namespaces import mounts
from tests.preloaded import CONTEXT
from tests.traces import SHARED, enter_shared_memory, shared_memory


def leave(home: Path, name: str) -> None:
    """End with a name in shared memory."""
    enter_shared_memory(home)
    (SHARED / name).write_bytes(b"left")


def test_names_left_in_shared_memory_are_those_of_the_processes_asked_about(tmp_path: Path) -> None:
    shared, name, other = shared_memory(tmp_path), f"test-{uuid4()}", f"test-{uuid4()}"
    assert shared.left() == set()
    process = CONTEXT.Process(target=leave, args=(tmp_path, name))
    process.start()
    process.join(60)
    assert shared.left() == {name}
    if not mounts():
        (SHARED / name).unlink()
        pytest.skip("processes have no /dev/shm of their own here")
    assert not (SHARED / name).exists()
    (SHARED / other).write_bytes(b"of another test")
    try:
        assert shared.left() == {name}
    finally:
        (SHARED / other).unlink()
