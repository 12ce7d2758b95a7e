"""Rows that are read before they are asked for: the same rows, the same errors, and no more of them than allowed."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.keys import KeyType
from realgraph.runtime.data.data import DataSet
from realgraph.runtime.data.read_ahead import ReadAhead
from realgraph.runtime.job.job import DataSpec
from tests.data_sets import CHATML, make_tokenizer, write

ROWS = st.lists(st.integers(0, 9), max_size=6)


class Rows:
    """Row i is i * i; negative ones raise. Counts what is read, and waits before it where asked to."""

    def __init__(self) -> None:
        self.read_rows: list[int] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, index: int) -> int:
        assert self.may_read.wait(10)
        self.read_rows.append(index)
        if index < 0:
            raise ValueError(f"no row {index}")
        return index * index


@given(st.lists(st.tuples(st.booleans(), ROWS), max_size=8), st.integers(0, 5))
def test_rows_are_those_that_are_read(turns: list[tuple[bool, list[int]]], most: int) -> None:
    ahead = ReadAhead(Rows().read, most)
    for guess, indices in turns:
        if guess:
            ahead.expect(indices)
        else:
            assert [ahead.row(index) for index in indices] == [index * index for index in indices]


def test_an_expected_row_is_read_once_and_beside_who_asks() -> None:
    rows = Rows()
    ahead = ReadAhead(rows.read, 4)
    ahead.expect([3, 4])
    reader = {thread.name for thread in threading.enumerate()}
    assert "read ahead" in reader
    assert [ahead.row(3), ahead.row(4), ahead.row(5)] == [9, 16, 25]
    assert sorted(rows.read_rows) == [3, 4, 5]
    assert ahead.row(3) == 9  # a row is given once: who asks again has it read again
    assert sorted(rows.read_rows) == [3, 3, 4, 5]


def test_of_more_guesses_than_allowed_the_oldest_are_given_up() -> None:
    rows = Rows()
    rows.may_read.clear()
    ahead = ReadAhead(rows.read, 2)
    ahead.expect([0])
    ahead.expect(range(1, 9))
    rows.may_read.set()
    assert ahead.row(8) == 64
    assert set(rows.read_rows) <= {0, 1, 7, 8}  # the thread may have begun 0, and then 1


def test_an_error_reaches_who_asks_and_the_reader_goes_on() -> None:
    ahead = ReadAhead(Rows().read, 4)
    ahead.expect([-1, 2])
    with pytest.raises(ValueError, match="no row -1"):
        ahead.row(-1)
    assert ahead.row(2) == 4
    ahead.expect([-1, 3])
    assert ahead.row(3) == 9


def test_a_data_set_is_read_by_two_threads_at_once(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": f"count to {i}: " + "one two " * (i % 7)}] for i in range(200)]
    rows: list[dict[str, Any]] = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)]
    rows[150]["prompt"] = 3
    inputs = {"prompt": KeyType("group", "tokens"), "answer": KeyType("group", "text")}
    spec = DataSpec(write(tmp_path / "a.jsonl", rows))
    alone, shared = (DataSet(spec, inputs, make_tokenizer(CHATML)) for _ in range(2))
    ahead = ReadAhead(shared.row, 400)
    ahead.expect(range(200))
    for index in reversed(range(200)):
        if index == 150:
            with pytest.raises(ConfigError, match=r"a\.jsonl:151"):
                ahead.row(index)
        else:
            assert ahead.row(index) == alone.row(index)
