"""Rows of CSV and compressed files: the same as of JSON lines, one by one and in any order, and their mistakes told."""

import csv
import gzip
import io
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.keys import parse_key_type
from realgraph.run_file.local_data import LocalData, first_rows, probe_data
from realgraph.runtime.data import hub
from realgraph.runtime.data.data import DataSet
from realgraph.runtime.data.row_files import open_rows
from realgraph.runtime.job.job import DataSpec
from tests.data_sets import CHATML, INPUTS, PLAIN, WHOLE, make_tokenizer, row, told

AT = Where("run.yaml", 3, "$.data.path")
TEXTS = [
    "",
    "1",
    "049",
    "a,b",
    'say "so"',
    "two\nlines",
    "two\r\nlines",
    "tab\there",
    "é漢🏳️‍🌈",
    " space ",
    "-0x1F",
    "null",
]
NAMES = [".jsonl", ".json.gz", ".jsonl.gz", ".jsonl.zst", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".csv.zst"]


ONE_ROW = b'{"prompt": "1", "answer": "2"}\n'


def packed(path: Path, content: bytes) -> str:
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = pyarrow.Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(content)
    return str(path)


def written(path: Path, rows: list[dict[str, str]], rng: random.Random) -> str:
    """The rows in the form that the name says, blank lines between."""
    if ".csv" not in path.name and ".tsv" not in path.name:
        text = "".join(json.dumps(row) + "\n" * rng.randint(1, 3) for row in rows)
        return packed(path, (rng.choice(["", "\ufeff"]) + text).encode())
    out = io.StringIO(newline="")
    end = rng.choice(["\n", "\r\n"])
    writer = csv.writer(out, delimiter="\t" if ".tsv" in path.name else ",", lineterminator=end)
    writer.writerow(rows[0])
    for item in rows:
        out.write(end * rng.randint(0, 2))
        writer.writerow(item.values())
    text = out.getvalue()
    return packed(path, (rng.choice(["", "\ufeff"]) + text.removesuffix(end)).encode())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_written_in_any_order(tmp_path: Path, name: str, seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        {"prompt": f"{i}+1=" + rng.choice(TEXTS), "answer": rng.choice(TEXTS), "n": str(i)}
        for i in range(rng.randint(2, 60))
    ]
    cut = rng.randint(1, len(rows) - 1)
    paths = [written(tmp_path / f"part-{k}{name}", piece, rng) for k, piece in enumerate((rows[:cut], rows[cut:]))]
    limit = rng.choice([None, rng.randint(1, 70)])
    found = open_rows(DataSpec(str(tmp_path), limit=limit))
    assert found.columns == ("prompt", "answer", "n")
    assert len(found) == min(len(rows), limit or len(rows))
    for i in rng.sample(range(len(found)), len(found)):
        assert found.read(i) == rows[i]
        assert Path(found.where(i).file) == Path(paths[i >= cut])
    probed = probe_data(str(tmp_path), limit, AT)
    assert (probed.columns, probed.n_rows) == (found.columns, len(found))
    assert list(first_rows(Path(paths[0]), 5, AT)) == rows[: min(cut, 5)]
    numbered = DataSet(DataSpec(str(tmp_path)), {**INPUTS, "n": parse_key_type("group json")}, PLAIN)
    assert row(numbered, len(rows) - 1).group["n"] == (len(rows) - 1 if found.all_text else str(len(rows) - 1))


def test_the_lines_of_csv_records_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n\n"two\nlines",1\n2,2\n')
    rows = open_rows(DataSpec(str(path)))
    assert [rows.where(i).line for i in range(2)] == [3, 5]


def test_threads_read_one_compressed_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [{"prompt": f"{i}\n{i}", "answer": "x" * rng.randint(0, 90)} for i in range(300)]
    found = open_rows(DataSpec(written(tmp_path / "a.csv.gz", rows, rng)))
    wrong: list[int] = []

    def read(seed: int) -> None:
        order = random.Random(seed)
        wrong.extend(i for i in order.choices(range(300), k=400) if found.read(i) != rows[i])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def read_all(path: Path) -> None:
    data = DataSet(DataSpec(str(path)), INPUTS, PLAIN)
    for i in range(len(data)):
        data.row(i)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"prompt,answer\n1,2\n1,2,3\n", "a.csv:3: $: has 3 fields, and the header names 2"),
        ("a.csv", b'prompt,answer\n1,2\n"1,2\n', "a.csv:3: $: is not CSV: unexpected end of data"),
        ("a.csv", b"prompt,answer\n1,\xff\n", "a.csv:2: $: is not UTF-8 text: byte 3 of the line"),
        ("a.csv", b"prompt,prompt\n1,2\n", "a.csv:1: $: the header names 'prompt' twice"),
        ("a.csv", b"prompt,\n1,2\n", "a.csv:1: $: the header has a column without a name"),
        ("a.csv", b"prompt,answer\n", "the data set has no rows"),
        ("a.csv", b"", "the data set has no rows"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "1", "answer": "2"}\n', mtime=0)[:-9],
            "a.jsonl.gz: $: can't be unpacked: ",
        ),
        ("a.jsonl.gz", b'{"prompt": 1}\n', "a.jsonl.gz: $: can't be unpacked: Not a gzipped file"),
        ("a.jsonl.zst", b'{"prompt": 1}\n', "a.jsonl.zst: $: can't be read: "),
        ("a.json.gz", gzip.compress(b'{"prompt": "1", "answer": "2"}\n{\n', mtime=0), "a.json.gz:2: $: is not JSON"),
    ],
)
def test_what_is_no_csv_or_no_archive_is_told_with_its_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_all(path)
    assert said in told(error)


def test_files_of_two_forms_or_twice_the_same_rows_are_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl", "b.jsonl.gz"):
        packed(tmp_path / name, b"x\n")
    with pytest.raises(ConfigError, match="CSV and JSON lines files side by side"):
        open_rows(DataSpec(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz lies beside b\.jsonl: the same rows would count twice"):
        open_rows(DataSpec(str(tmp_path / "b*")))


def test_a_folder_of_save_to_disk_is_refused_with_what_to_write(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "1", "answer": "2"}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "several")
    for name, split in (("one", ""), ("several", "['train']")):
        with pytest.raises(ConfigError) as error:
            open_rows(DataSpec(str(tmp_path / name)))
        (problem,) = error.value.problems
        assert problem.text == "the folder was written by save_to_disk, whose Arrow files are not read"
        written = f"datasets.load_from_disk('{tmp_path / name}'){split}"
        assert problem.hint == f'write parquet: {written}.to_parquet("train.parquet")'


def test_the_folder_of_the_split_is_the_one_to_name(tmp_path: Path) -> None:
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.jsonl").write_bytes(ONE_ROW)
    with pytest.raises(ConfigError, match=f"its folder train does: name {tmp_path / 'train'}"):
        open_rows(DataSpec(str(tmp_path)))


def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path) -> None:
    marked = tmp_path / "a.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + ONE_ROW)
    assert row(DataSet(DataSpec(str(marked)), INPUTS, PLAIN), 0).group["answer"] == "2"
    assert probe_data(str(marked), None, AT).columns == ("prompt", "answer")


ARRAY = (
    b'\xef\xbb\xbf[\n  {"prompt": "1+1=",\r\n   "answer": "a\\nb"},\n'
    b'  {"prompt": "2+1=", "answer": "[3]"}, {"prompt":"]","answer":"1"}\n]\n'
)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
def test_one_array_of_rows_is_read_as_its_rows_are(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    packed(file, ARRAY)
    data = DataSet(DataSpec(str(file)), INPUTS, PLAIN)
    assert [row(data, i).group["answer"] for i in range(len(data))] == ["a\nb", "[3]", "1"]
    assert [data.where(i).line for i in range(3)] == [2, 4, 4]
    assert probe_data(str(file), None, AT) == LocalData(("prompt", "answer"), 3)
    assert probe_data(str(file), 2, AT).n_rows == len(DataSet(DataSpec(str(file), limit=2), INPUTS, PLAIN)) == 2
    assert [one["answer"] for one in first_rows(file, 2, AT)] == ["a\nb", "[3]"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'[{"prompt": 1},', "begins as a JSON array and is none"),
        (b"[1]\n[2]", "begins as a JSON array and is none"),
        (b'[\n{"prompt": "1", "answer": "1"},\n3]', r"a\.json:3.*is not a JSON object"),
    ],
)
def test_an_array_that_is_none_of_rows_is_refused_with_its_line(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=said) as error:
        DataSet(DataSpec(str(file)), INPUTS, PLAIN).row(1)
    assert "one array of" in str(error.value)


NESTED = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 7, "of": {"split": "train"}},
    "a.b": "flat",
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_values_of_mappings_are_columns_by_their_path(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist([NESTED]), file)
    else:
        file.write_text(json.dumps(NESTED))
    inside = ("reward_model.ground_truth", "reward_model.style", "extra_info.index", "extra_info.of")
    assert probe_data(str(file), None, AT).columns == (*NESTED, *inside, "extra_info.of.split")
    columns = {"answer": "reward_model.ground_truth", "split": "extra_info.of.split", "flat": "a.b"}
    inputs = {**INPUTS, **dict.fromkeys(("split", "flat"), INPUTS["answer"])}
    data = DataSet(DataSpec(str(file), columns=columns), inputs, make_tokenizer(CHATML))
    assert {name: row(data, 0).group[name] for name in columns} == {"answer": "2", "split": "train", "flat": "flat"}
    with pytest.raises(ConfigError, match=r"no column 'reward_model\.truth'(.|\n)*mean 'reward_model\.ground_truth'\?"):
        DataSet(DataSpec(str(file), columns={"answer": "reward_model.truth"}), INPUTS, make_tokenizer(CHATML))


def test_a_row_that_lacks_a_value_of_a_mapping_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "1", "of": {"answer": "1"}}\n{"prompt": "1", "of": null}\n')
    data = DataSet(DataSpec(str(file), columns={"answer": "of.answer"}), INPUTS, PLAIN)
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: .*\.of\.answer: this row lacks the column"):
        data.row(1)


def test_the_folder_that_has_the_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").touch()
    (tmp_path / "data" / "train.jsonl").write_bytes(ONE_ROW)
    with pytest.raises(ConfigError, match=rf"its folder data does: name {tmp_path}/data"):
        open_rows(DataSpec(str(tmp_path)))


def test_a_name_that_is_neither_a_file_nor_in_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "out_of_reach", lambda: "the Hub can't be reached")
    with pytest.raises(ConfigError, match="there is no such file or folder, and no data set of this id"):
        open_rows(DataSpec("data/trian"))


def test_no_number_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["1", "1"], "answer": [2.5, float("nan")]}), file)
    data = DataSet(DataSpec(str(file)), INPUTS, PLAIN)
    assert row(data, 0).group["answer"] == "2.5"
    with pytest.raises(ConfigError, match="expected text, got float nan"):
        data.row(1)


def test_cells_are_read_as_what_their_key_is(tmp_path: Path) -> None:
    """CSV has no types: the graph has. Text stays as it is written."""
    cells = {"answer": "049", "i": " 7", "x": "1e-3", "yes": "True", "no": "0", "tests": '{"in": [1]}', "e": "3"}
    types = {"i": "int32", "x": "float32", "yes": "bool", "no": "bool", "tests": "json", "e": "text"}
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["prompt", *cells], ["1", *cells.values()], ["1", "049", "seven", *[""] * 5]])
    (tmp_path / "a.csv").write_text(out.getvalue(), newline="")
    inputs = {**INPUTS, **{name: parse_key_type(f"group {dtype}") for name, dtype in types.items()}}
    data = DataSet(DataSpec(str(tmp_path / "a.csv")), inputs, PLAIN)
    found = row(data, 0).group
    expected = {"answer": "049", "i": 7, "x": 1e-3, "yes": True, "no": False, "tests": {"in": [1]}, "e": "3"}
    assert {name: found[name] for name in expected} == expected
    with pytest.raises(ConfigError, match=r"a\.csv:3: \$\.i: expected a number, got 'seven'"):
        data.row(1)


def test_chats_stand_in_a_cell_as_json(tmp_path: Path) -> None:
    chat: list[Any] = [{"role": "user", "content": 'hello, "you"'}, {"role": "assistant", "content": "so"}]
    rows = {
        "chat": {"messages": json.dumps(chat)},
        "text": {"prompt": "hello", "response": "[so] it goes"},
        "ids": {"tokens": "[3, 4, 5]", "mask": "[0, 1, 1]"},
    }
    tokenizer = make_tokenizer(CHATML)
    texts = {}
    for name, item in rows.items():
        path = written(tmp_path / f"{name}.csv", [item], random.Random(0))
        (sample,) = row(DataSet(DataSpec(path), WHOLE, tokenizer), 0).samples
        texts[name] = tokenizer.decode([t for t, use in zip(sample["tokens"], sample["mask"], strict=True) if use])
    assert texts["chat"] == "so<|im_end|>"
    assert texts["text"] == "[so] it goes<|im_end|>"
    assert texts["ids"] == tokenizer.decode([4, 5])


def test_check_answers_at_once_for_large_files(tmp_path: Path) -> None:
    """Rows of large CSV and compressed files are not counted; their columns are known all the same."""
    line = b"x" * 400 + b",y\n"
    big = packed(tmp_path / "a.csv", b"prompt,answer\n" + line * 60_000)
    noise = random.Random(0).randbytes(15_000_000).hex().encode()
    content = b"".join(b'{"prompt": "%s"}\n' % noise[i : i + 3000] for i in range(0, len(noise), 3000))
    archive = tmp_path / "a.jsonl.gz"
    archive.write_bytes(gzip.compress(content * 2, 1, mtime=0))
    assert archive.stat().st_size > 20 * 10**6
    began = time.monotonic()
    assert probe_data(big, None, AT).columns == ("prompt", "answer")
    assert probe_data(str(archive), None, AT).columns == ("prompt",)
    assert probe_data(big, 5, AT).n_rows == 5
    assert time.monotonic() - began < 1


def test_prompts_of_csv_may_be_messages_in_json(tmp_path: Path) -> None:
    chatty = make_tokenizer(CHATML)
    ask, answer = [{"role": "user", "content": "hello"}], [{"role": "assistant", "content": "I know"}]
    head = "prompt,answer,response\n"
    cells = (json.dumps(ask), "1", json.dumps(answer))
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    (tmp_path / "a.csv").write_text(head + quoted)
    spec, turn = DataSpec(str(tmp_path / "a.csv")), "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    data = DataSet(spec, INPUTS, chatty)
    assert chatty.decode(row(data, 0).group["prompt"]) == turn
    assert data.asked(row(data, 0), "prompt").conversation == ask
    (sample,) = row(DataSet(spec, WHOLE, chatty), 0).samples
    assert chatty.decode(sample["tokens"]) == turn + "I know<|im_end|>"
    (tmp_path / "a.csv").write_text(head + f'"{ask}",1,"{answer}"')  # as str and so pandas write lists
    for inputs in (INPUTS, WHOLE):
        with pytest.raises(
            ConfigError, match=r"a\.csv:2: \$\.prompt: a list of messages that is no JSON: .*json\.dumps"
        ):
            DataSet(spec, inputs, chatty).row(0)
