"""Damaged inputs through the command line, in this process: no traceback, no hang, and a refusal names the place.

The full sample, with real runs, resumes and damaged checkpoints, is `benchmarks/bad_inputs.py`.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from realgraph import cli
from realgraph.graphs.yaml import files
from tests.bad_inputs import QUICK, ROOT, SEARCH, Case, draw, make_place, verdict
from tests.run_texts import place as run_place
from tests.run_texts import problems_of, refused
from tests.runs import make_home

SAMPLE = 60
DEADLINE_SECONDS = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything valid, and a plan."""
    folder = make_place(make_home(tmp_path_factory.mktemp("valid")))
    code, output = answered(folder, ("plan", "run.yaml", "--out", "plan.json", "--time-limit", "5", "--brief"))
    assert code == 0, output
    shutil.copy(folder / "plan.json", folder / "same.json")
    return folder


def copied(place: Path, tmp_path: Path) -> Path:
    """A place of one's own. Links stay links: what one leads to may have no end."""
    shutil.copytree(place, tmp_path / "place", symlinks=True)
    return tmp_path / "place"


@contextmanager
def ended_in(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answered(folder: Path, words: tuple[str, ...]) -> tuple[int | None, str]:
    """Exit code, None where it took too long, and output of a command in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["realgraph", *words])
        with (folder / "output.txt").open("w", encoding="utf-8") as output:
            patch.setattr(sys, "stdout", output)
            patch.setattr(sys, "stderr", output)
            code: int | None = None  # of one that did not end in time
            try:
                with ended_in(DEADLINE_SECONDS):
                    cli.main()
                raise AssertionError("the console script ends by an exit code")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except TimeoutError:
                pass
    return code, (folder / "output.txt").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted({words for source in QUICK for words in source.commands}), ids=" ".join)
def test_what_is_damaged_was_valid(words: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    """Otherwise every refusal below says nothing."""
    code, output = answered(copied(place, tmp_path), words)
    assert (code, verdict(Case("control", words), code, output)) == (0, ""), output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SAMPLE))
def test_a_damaged_input_is_refused_at_its_place_or_still_valid(seed: int, place: Path, tmp_path: Path) -> None:
    case = draw(random.Random(f"sample {seed}"), place, QUICK)
    folder = copied(place, tmp_path)
    if case.file:
        (folder / case.file).write_bytes(case.content)
    code, output = answered(folder, case.words)
    assert verdict(case, code, output) == "", f"{case.words} ({case.file}: {case.what}) -> {code}\n{output}"


# --- what the sample may miss -----------------------------------------------------------------------------------------

TEXTS = {
    b"a: \0\n": "run.yaml:1: $: YAML syntax: the character U+0000 can't stand in YAML",
    b"a: 1\nb: \x1b[2J\n": "run.yaml:2: $: YAML syntax: the character U+001B can't stand in YAML",
    b'a:\n  b: "\\0"\n': "run.yaml:2: $.a.b: the character U+0000 can't stand in text",
    b'a: "\\ud800"\n': "run.yaml:1: $.a: the character U+D800 can't stand in text",
    b'"\\0": 1\n': "run.yaml:1: $: the character U+0000 can't stand in text",
    b"a: \xff\n": "run.yaml: $: is not UTF-8 text: byte 3",
    b"\xff\xfea\x00:\x00": "run.yaml: $: is not UTF-8 text: byte 0",
    b"a: " + b"[" * 3000: "run.yaml:1: $: YAML syntax: nested more than 32 deep",
    b"a: " + b"[" * 60 + b"]" * 60: "run.yaml:1: $: YAML syntax: nested more than 32 deep",
    b"a: " + b"9" * 5000: "run.yaml:1: $.a: " + "9" * 80 + "... is too large: whole numbers end at 2^63 - 1",
    b"a: 9223372036854775808": "run.yaml:1: $.a: 9223372036854775808 is too large",
    b"a: !!int x": "run.yaml:1: $.a: 'x' is not a whole number",
    b"a: !!bool x": "run.yaml:1: $.a: 'x' is not true or false",
    b"a: !!float ''": "run.yaml:1: $.a: '' is not a number",
    b"a: !!timestamp x": "run.yaml:1: $.a: tag:yaml.org,2002:timestamp is not a plain value",
    b"a: !!binary aGk=": "run.yaml:1: $.a: tag:yaml.org,2002:binary is not a plain value",
    b"graph: grpo\n---\ngraph: ppo\n": "run.yaml:2: $: YAML syntax: expected a single document",
    b"a: [" + b"1," * 100_000: "run.yaml:1: $: YAML syntax: more than 20000 values",
    b"a: " + b"x" * (1 << 20): "run.yaml: $: can't be read: it is longer than 1 MiB",
    b"": "$.graph: required, but not given",
}


@pytest.mark.slow
@pytest.mark.parametrize(("content", "line"), TEXTS.items(), ids=[repr(text[:16]) for text in TEXTS])
def test_a_text_that_is_no_run_file_is_refused_at_its_line(content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    code, output = answered(tmp_path, ("check", "run.yaml"))
    assert (code, line in output, "Traceback" in output) == (2, True, False), output


def test_a_byte_order_mark_is_no_mistake(place: Path, tmp_path: Path) -> None:
    folder = copied(place, tmp_path)
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + (place / "run.yaml").read_bytes())
    assert answered(folder, ("check", "run.yaml"))[0] == 0


def test_a_file_may_come_through_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, (ROOT / "graphs" / "library" / "grpo.yaml").read_bytes())
    os.close(writer)
    code, output = answered(tmp_path, ("check", f"/dev/fd/{reader}"))
    os.close(reader)
    assert (code, "ok, as a graph without a run. Graph grpo" in output) == (0, True), output


READERS = (
    ("check", "FILE"),
    ("plan", "FILE"),
    ("graph", "./FILE"),
    ("plan", "run.yaml", "--plan", "FILE", *SEARCH),
    ("plan", "run.yaml", "--costs", "FILE", *SEARCH),
    ("plan", "run.yaml", "--lengths", "FILE", *SEARCH),
    ("plan", "--problem", "FILE"),
    ("plan", "diff", "FILE", "FILE"),
)


@pytest.mark.slow
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_what_is_no_file_with_an_end_is_refused(
    words: tuple[str, ...], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a pipe without a writer, one without an end, a file without permission, one that is not there."""
    folder = copied(place, tmp_path)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "looped").symlink_to("looped")
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 0.1)
    for name in ("folder", "pipe", "endless", "looped", "nowhere"):
        code, output = answered(folder, tuple(word.replace("FILE", name) for word in words))
        case = Case("a strange file", words, name)
        assert verdict(case, code, output) == "", f"{words} of {name} -> {code}\n{output}"
        assert code == 2, f"{words} of {name}\n{output}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("$.period_seconds", "NaN", "NaN is no number of JSON"),
        ("$.period_seconds", "-Infinity", "-Infinity is no number of JSON"),
        ("$.period_seconds", "1e999", "expected a finite number"),
        ("$.period_seconds", "-1.0", "expected `float` >= 0.0"),
        ("$.allocations.rollout.seconds", "-0.5", "expected `float` >= 0.0"),
        ("$.allocations.rollout.running", "0", "0 sequences decode at once: expected 1 or more"),
        ("$.allocations.rollout.running", "-3", "expected `int` >= 0"),
        ("$.allocations.rollout.running", '"many"', "expected `int`"),
        ("$.allocations.rollout.peak_bytes", "1e400", "expected a finite number"),
        ("$.allocations.train.microbatches", str(10**30), "expected `int`"),
        ("$.allocations.train.layout.dp", "0", "expected `int` >= 1"),
        ("$.allocations.train.layout.mesh.first", "7", "devices 7 to 8 are not all of the cluster's"),
        ("$.allocations.train.layout.mesh.n_devices", "0", "expected `int` >= 1"),
        ("$.allocations.train.max_tokens_per_microbatch", "-1", "expected `int` >= 1"),
        ("$.staleness", "-1", "expected `int` >= 0"),
        ("$.orders.0[0].offset", "1e30", ""),
        ("$.orders.0[0].call", '"nothing"', "'nothing' has no allocation on this device"),
        ("$.hashes.graph", "null", "expected `str`"),
    ],
)
def test_an_edit_of_a_plan_that_means_nothing_is_refused_with_its_path(
    path: str, value: str, words: str, place: Path, tmp_path: Path
) -> None:
    plan: Any = json.loads((place / "plan.json").read_text())
    *keys, last = re.findall(r"\w+", path)
    entry = plan
    for key in keys:
        entry = entry[int(key)] if isinstance(entry, list) else entry[key]
    entry[last] = "HERE"
    folder = copied(place, tmp_path)
    (folder / "plan.json").write_text(json.dumps(plan).replace('"HERE"', value))
    code, output = answered(folder, ("plan", "run.yaml", "--plan", "plan.json", *SEARCH))
    assert code == 2, output
    assert "Traceback" not in output
    places = [path, path.rpartition(".")[0], path.partition("[")[0], "$:" if "JSON" in words else path]
    assert any(f"plan.json: {place}" in output for place in places if place != "$"), output
    assert words in output


NAMES = ("../../evil", "/abs/x", "a/b", "", " ", "a\nb", "\x1b[2J", "x" * 300)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_component_of_a_path(name: str, run_folder: Path) -> None:
    (problem,) = refused(run_folder, f"name={json.dumps(name)}")
    assert problem.where.path == "$.name"
    assert "can't be the name of a run" in problem.text


def test_the_name_of_a_graph_names_runs_too(run_folder: Path) -> None:
    from realgraph.run_file.compose import check_run
    from realgraph.run_file.open_graph import open_graph

    text = (Path(__file__).parent.parent / "graphs/library/grpo.yaml").read_text()
    (run_folder / "mine.yaml").write_text(text.replace("name: grpo", "name: ../grpo"))
    for call in (
        lambda: open_graph(str(run_folder / "mine.yaml")),
        lambda: check_run(run_folder / "run.yaml", [f"graph={run_folder / 'mine.yaml'}"]),
    ):
        (problem,) = problems_of(call)
        assert problem.where.path == "$.name"
    check_run(run_folder / "run.yaml", [f"graph={run_folder / 'mine.yaml'}", "name=fine", "outputs.dir=/tmp/anywhere"])


run_folder = run_place
