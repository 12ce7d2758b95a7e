"""Data sets: rows from files as prompts of a graph, policies for long ones, errors that name their place."""

import random
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.keys import KeyType, parse_key_type
from realgraph.runtime.data import hub
from realgraph.runtime.data.data import DataSet, TooLong
from realgraph.runtime.data.tokenize import load_tokenizer, plain_sample, prompt_tokens
from realgraph.runtime.job.job import DataSpec
from tests.data_sets import CHATML, INPUTS, INST, PLAIN, WHOLE, make_tokenizer, row, told, write

# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_json_and_parquet_files_are_those_written(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = [{"q": f"{i}+1 " + "é" * rng.randint(0, 9), "answer": i, "level": i / 3} for i in range(rng.randint(1, 40))]
    folder, tables = tmp_path / "json", tmp_path / "parquet"
    folder.mkdir()
    tables.mkdir()
    cuts = sorted(rng.sample(range(len(rows) + 1), min(2, len(rows))))
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    for k, piece in enumerate(pieces):
        lines: list[Any] = []
        for item in piece:
            lines += [item] + [""] * rng.randint(0, 2)  # blank lines are no rows
        write(folder / f"part-{k}.jsonl", lines)
        table = pyarrow.Table.from_pylist(piece, schema=pyarrow.Table.from_pylist(rows).schema)
        pyarrow.parquet.write_table(table, tables / f"part-{k}.parquet", row_group_size=rng.randint(1, 9))
    inputs = {**INPUTS, "level": parse_key_type("group float32")}
    limit = rng.choice([None, rng.randint(1, 50)])
    for path in (str(folder), str(tables), f"{folder}/part-*.jsonl", f"{tables}/*.parquet"):
        spec = DataSpec(path, columns={"prompt": "q"}, limit=limit)
        data = DataSet(spec, inputs, PLAIN)
        assert len(data) == min(len(rows), limit or len(rows))
        for i in rng.sample(range(len(data)), len(data)):
            found = row(data, i)
            assert found.raw == rows[i]
            assert found.group["answer"] == str(i)
            assert found.group["level"] == pytest.approx(i / 3)
            assert PLAIN.decode(found.group["prompt"]) == rows[i]["q"]


def test_a_split_is_chosen_by_file_name_in_a_folder_only(tmp_path: Path) -> None:
    for name, n in (("train-0", 3), ("train-1", 2), ("test_hard", 1)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": "1", "answer": name}] * n)
    assert len(DataSet(DataSpec(str(tmp_path)), INPUTS, PLAIN)) == 5
    assert len(DataSet(DataSpec(str(tmp_path), split="test"), INPUTS, PLAIN)) == 1
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(str(tmp_path), split="dev"), INPUTS, PLAIN)
    assert "no file of the split 'dev'" in told(error)
    assert "test, train" in told(error)
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(str(tmp_path / "train-0.jsonl"), split="test"), INPUTS, PLAIN)
    assert "there is no split 'test'" in told(error)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{broken"], r"a\.jsonl:3: \$: is not JSON"),
        ([[1, 2]], r"a\.jsonl:3: \$: is not a JSON object"),
        ([{"prompt": "1"}], r"a\.jsonl:3: \$\.answer: this row lacks the column"),
        ([{"prompt": "1", "answer": None}], r"a\.jsonl:3: \$\.answer: expected text, got null"),
        (
            [{"prompt": 7, "answer": "1"}],
            r"a\.jsonl:3: \$\.prompt: expected text or a list of chat messages, got int 7",
        ),
        ([{"prompt": "", "answer": "1"}], r"a\.jsonl:3: \$\.prompt: the prompt is empty"),
        (
            [{"prompt": [{"content": "x"}], "answer": "1"}],
            r"a\.jsonl:3: \$\.prompt\[0\]: expected messages with `role`",
        ),
        ([{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}], "the tokenizer has no chat template"),
    ],
)
def test_a_bad_row_names_its_file_line_and_column(tmp_path: Path, rows: list[Any], said: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "2"}, "", *rows])
    data = DataSet(DataSpec(path), INPUTS, PLAIN)
    assert row(data, 0).group["answer"] == "2"
    with pytest.raises(ConfigError) as error:
        data.row(1)
    assert re.search(said, told(error)), told(error)


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("int32", 2**31, "expected a finite number within int32, got int 2147483648"),
        ("int64", 2**63, "expected a finite number within int64, got int 9223372036854775808"),
        ("int64", 0.5, "expected int64, got float 0.5"),
        ("float32", 1e39, "expected a finite number within float32, got float 1e+39"),
        ("float64", 10**400, "expected a finite number within float64, got int 1000"),
        ("float32", "0.5", "expected float32, got str '0.5': a number stands without quotes"),
        ("float32", True, "expected float32, got bool True"),
    ],
)
def test_numbers_that_their_dtype_cannot_hold_are_refused(tmp_path: Path, dtype: str, value: Any, said: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "n": value}])
    inputs = {"prompt": INPUTS["prompt"], "n": parse_key_type(f"group {dtype}")}
    data = DataSet(DataSpec(path), inputs, PLAIN)
    with pytest.raises(ConfigError) as error:
        data.row(0)
    assert f"a.jsonl:1: $.n: {said}" in told(error)


@pytest.mark.parametrize(("dtype", "cell"), [("int64", "inf"), ("float32", "nan"), ("int32", "nan")])
def test_numbers_of_csv_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, cell: str) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,n\n1,{cell}\n")
    inputs = {"prompt": INPUTS["prompt"], "n": parse_key_type(f"group {dtype}")}
    data = DataSet(DataSpec(str(tmp_path / "a.csv")), inputs, PLAIN)
    with pytest.raises(ConfigError) as error:
        data.row(0)
    assert f"a.csv:2: $.n: expected a finite number within {dtype}, got float {cell}" in told(error)


def test_a_bad_value_in_parquet_names_its_row(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1", ""], "answer": ["a", "b"]}), tmp_path / "a.parquet")
    data = DataSet(DataSpec(str(tmp_path / "a.parquet")), INPUTS, PLAIN)
    with pytest.raises(ConfigError) as error:
        data.row(1)
    assert "a.parquet: row 1: $.prompt: the prompt is empty" in told(error)


def test_missing_files_columns_and_impossible_inputs_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1", "answr": "2"}])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("no parquet")
    cases: list[tuple[DataSpec, dict[str, KeyType], str]] = [
        (DataSpec(str(tmp_path / "gone.jsonl")), INPUTS, "there is no such file"),
        (DataSpec(str(tmp_path / "empty.jsonl")), INPUTS, "the data set has no rows"),
        (DataSpec(str(tmp_path / "bad.parquet")), INPUTS, "can't be read"),
        (DataSpec(str(tmp_path)), INPUTS, "JSON lines and parquet files side by side"),
        (DataSpec(path, columns={"prompt": "question"}), INPUTS, "did you mean 'answr'?; map it: data.columns.answer"),
        (DataSpec(path), WHOLE, "needs the columns 'prompt' and 'response', or 'messages'"),
        (DataSpec(path), {"x": parse_key_type("sample float32")}, "data can't give a key of the type sample float32"),
    ]
    for spec, inputs, said in cases:
        with pytest.raises(ConfigError) as error:
            DataSet(spec, inputs, PLAIN)
        assert said in told(error)
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(path), WHOLE, PLAIN, samples_per_group=2)
    assert "needs the columns 'chosen' and 'rejected'" in told(error)


def test_a_data_set_of_the_hub_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*args: object, **options: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(hub, "out_of_reach", lambda: "")
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec("some/where", subset="main"), INPUTS, PLAIN)
    assert "some/where (main, train): $: can't be loaded: ConnectionError: no route to the hub" in told(error)


def test_rows_of_the_hubs_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own reader, on a local file instead of a download."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}", "answer": str(i)} for i in range(5)]
    table = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, split: table)
    data = DataSet(DataSpec("some/where", limit=3), INPUTS, PLAIN)
    assert len(data) == 3
    assert row(data, 2).raw == rows[2]


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drop", "truncate_left", "fail"])
def test_prompts_that_are_too_long(tmp_path: Path, policy: Any) -> None:
    text = "what is it you know? " * 20
    path = write(tmp_path / "a.jsonl", [{"prompt": text, "answer": "1"}, {"prompt": "so", "answer": "2"}])
    data = DataSet(DataSpec(path, max_prompt_tokens=9, too_long=policy), INPUTS, PLAIN)
    whole = PLAIN.encode(text, add_special_tokens=True)
    assert row(data, 1).group["answer"] == "2"
    if policy == "drop":
        assert data.row(0) == TooLong(0, len(whole), 9)
    elif policy == "truncate_left":
        assert row(data, 0).group["prompt"] == whole[-9:]
    else:
        with pytest.raises(ConfigError) as error:
            data.row(0)
        assert f"a.jsonl:1: $.prompt: the prompt has {len(whole)} tokens, more than" in told(error)


def test_chats_are_rendered_where_the_tokenizer_has_a_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "hello", "answer": "1"}, {"prompt": messages, "answer": "1"}])
    chatty = make_tokenizer(CHATML)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    data = DataSet(DataSpec(path), INPUTS, chatty)
    assert [chatty.decode(row(data, i).group["prompt"]) for i in range(2)] == [expected] * 2
    data = DataSet(DataSpec(path, system="be brief"), INPUTS, chatty)
    with_system = "<|im_start|>system\nbe brief<|im_end|>\n" + expected
    assert [chatty.decode(row(data, i).group["prompt"]) for i in range(2)] == [with_system] * 2
    data = DataSet(DataSpec(path, chat=False), INPUTS, chatty)
    assert chatty.decode(row(data, 0).group["prompt"]) == "hello"
    refusing = DataSet(DataSpec(path, system="be brief"), INPUTS, make_tokenizer(INST))
    with pytest.raises(ConfigError) as error:
        refusing.row(0)
    assert "a.jsonl:1: $.prompt: the chat template refuses these messages: no system role" in told(error)


def test_a_plain_prompt_gets_the_tokenizers_first_token() -> None:
    tokenizer = make_tokenizer(bos=True)
    assert prompt_tokens("hello", tokenizer) == [0, *tokenizer.encode("hello", add_special_tokens=False)]
    tokens, mask = plain_sample("hello", " world", tokenizer)
    assert tokens.count(0) == 1
    assert mask == [False] * (len(tokens) - sum(mask)) + [True] * sum(mask)


def test_the_raw_token_ids_and_columns_of_other_types(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [5, 6, 7], "n": 3, "ok": True, "tests": [{"in": 1}], "w": 2}])
    types = {
        "prompt": "group tokens",
        "n": "group int32",
        "ok": "group bool",
        "tests": "group json",
        "w": "group float32",
    }
    data = DataSet(DataSpec(path), {name: parse_key_type(text) for name, text in types.items()}, PLAIN)
    assert row(data, 0).group == {"prompt": [5, 6, 7], "n": 3, "ok": True, "tests": [{"in": 1}], "w": 2.0}


def test_tokenizers_are_loaded_without_their_code(tmp_path: Path) -> None:
    PLAIN.save_pretrained(str(tmp_path / "good"))  # type: ignore[attr-defined]
    loaded = load_tokenizer(str(tmp_path / "good"))
    assert loaded.encode("hello world", add_special_tokens=True) == PLAIN.encode("hello world", add_special_tokens=True)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(str(tmp_path / "absent"))
    assert "no tokenizer can be loaded" in told(error)


@pytest.mark.parametrize("field", [{"chat": True}, {"system": "Be brief."}])
def test_chat_settings_without_a_template_are_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "hello", "answer": "world"}])
    with pytest.raises(ConfigError) as error:
        DataSet(DataSpec(path, **field), INPUTS, PLAIN)
    name = next(iter(field))
    assert f"$.data.{name}: data.{name} is set, but the tokenizer has no chat template" in told(error)
    with pytest.raises(ConfigError, match=r"data\.system needs chat messages, and data\.chat is false"):
        DataSet(DataSpec(path, system="Be brief.", chat=False), INPUTS, make_tokenizer(CHATML)).row(0)
