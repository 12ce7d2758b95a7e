"""The command line as a user types it: exit codes, what is printed where, and what may not be imported."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from realgraph.commands.init import run_template
from realgraph.graphs.yaml.document import parse_document
from realgraph.graphs.yaml.library import library_names
from tests.console_script import typed

# torch is made impossible to import; what is left must answer all the same.
NO_TORCH = "import sys; sys.modules.update(torch=None, transformers=None); from realgraph.cli import main; main()"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(run_template("grpo", tmp_path))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--help"], "Usage"),
        (["check", "FILE"], "ok. Graph grpo: 4 calls, 1 model, 10 keys"),
        (["check", "FILE", "--resolved"], "group_size: 8"),
        (["plan", "FILE", "cluster={kind: H100-SXM, devices: 8}"], "allocation"),
        (["graph", "grpo"], "rollout"),
        (["graphs"], "sft"),
        (["init"], "graph: grpo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_light_commands_need_no_torch_and_answer_at_once(arguments: list[str], part: str, run_file: Path) -> None:
    typed_words = [str(run_file) if word == "FILE" else word for word in arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *typed_words], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert part in done.stdout
    busy_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert busy_seconds < 3.0 or arguments[0] == "plan", "processor seconds; under a second where nothing else runs"


def test_every_mistake_goes_to_stderr_with_exit_code_2(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = typed("check", str(run_file), "stesp=3", "calls.train.l[r]=1", "params.lrr=1", monkeypatch=monkeypatch)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "command line: $.calls.train[\"l[r]\"]: unknown key 'l[r]' of kind train",
        "  hint: did you mean 'lr'?",
        "command line: $.params.lrr: the graph grpo has no parameter 'lrr'",
        "  hint: did you mean 'lr'?",
        "command line: $.stesp: unknown key 'stesp'",
        "  hint: did you mean 'steps'?",
    ]


def test_a_report_as_json_has_the_problems_or_the_graph(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("check", str(run_file), "--json", monkeypatch=monkeypatch) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["problems"], report["run"]["steps"]) == (True, [], 100)
    assert list(report["graph"]["calls"]) == ["rollout", "reward", "advantage", "train"]
    assert "resolved" not in report
    assert typed("check", str(run_file), "--json", "--resolved", "steps=7", monkeypatch=monkeypatch) == 0
    resolved = json.loads(capsys.readouterr().out)["resolved"]
    assert re.search(r"^steps: 7 +# command line", resolved, re.MULTILINE)
    assert typed("check", str(run_file), "steps=0", "--json", monkeypatch=monkeypatch) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [
        {
            "file": "command line",
            "line": 0,
            "path": "$.steps",
            "text": "expected a whole number >= 1, got 0",
            "hint": "",
            "rule": "schema",
        }
    ]


def test_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grpo_small.yaml").touch()
    assert typed("check", str(tmp_path / "grpo_smal.yaml"), monkeypatch=monkeypatch) == 2
    assert "did you mean 'grpo_small.yaml'?" in capsys.readouterr().err
    assert typed("check", "/nowhere/run.yaml", monkeypatch=monkeypatch) == 2
    text = "/nowhere/run.yaml: $: can't be read: No such file or directory\n  hint: realgraph init writes a run file\n"
    assert capsys.readouterr().err == text
    assert typed("graph", "gropo", monkeypatch=monkeypatch) == 2
    assert "did you mean 'grpo'?" in capsys.readouterr().err


def test_a_graph_file_is_checked_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parent.parent / "graphs/library/grpo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text)
    assert typed("check", str(tmp_path / "mine.yaml"), monkeypatch=monkeypatch) == 0
    assert "ok, as a graph without a run. Graph grpo" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text.replace("reads: [reward]", "reads: [rewrad]"))
    assert typed("check", str(tmp_path / "mine.yaml"), monkeypatch=monkeypatch) == 2
    assert "did you mean 'reward'?" in capsys.readouterr().err
    assert typed("check", str(tmp_path / "mine.yaml"), "--resolved", monkeypatch=monkeypatch) == 2


def test_pictures_are_written_and_the_library_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--mermaid", str(tmp_path / "g.mmd"), "--svg", str(tmp_path / "g.svg")]
    assert typed("graph", "ppo", *files, monkeypatch=monkeypatch) == 0
    assert (tmp_path / "g.svg").read_text().startswith("<svg")
    assert "flowchart" in (tmp_path / "g.mmd").read_text()
    assert typed("graph", "ppo", "--svg", str(tmp_path / "none" / "g.svg"), monkeypatch=monkeypatch) == 2
    assert "can't be written: there is no directory" in capsys.readouterr().err
    assert typed("graphs", monkeypatch=monkeypatch) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")}
    assert listed >= set(library_names())


def test_init_writes_a_run_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yaml"
    assert typed("init", "--graph", "ppo", "--out", str(out), monkeypatch=monkeypatch) == 0
    assert parse_document(out.read_text(), "x").tree["graph"] == "ppo"
    assert typed("check", str(out), monkeypatch=monkeypatch) == 0
    out.write_text("mine")
    assert typed("init", "--out", str(out), monkeypatch=monkeypatch) == 2
    assert out.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


def test_schemas_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("schema", "--out-dir", str(tmp_path), monkeypatch=monkeypatch) == 0
    assert json.loads((tmp_path / "realgraph.schema.json").read_text())["title"] == "A realgraph run file"
    assert (tmp_path / "reference.md").read_text().startswith("# YAML reference")
    assert typed("schema", "--out-dir", str(tmp_path / "new" / "folder"), monkeypatch=monkeypatch) == 0
    assert (tmp_path / "new" / "folder" / "graph.schema.json").exists()
    for place in ("reference.md", "reference.md/below"):
        assert typed("schema", "--out-dir", str(tmp_path / place), monkeypatch=monkeypatch) == 2


def test_a_working_directory_that_is_gone_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert typed("check", "run.yaml", monkeypatch=monkeypatch) == 2
    assert "the working directory can't be used: No such file or directory\n  hint: cd" in capsys.readouterr().err


def test_the_measurements_of_a_run_alone_are_no_run_to_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("plan", "--run", "runs/one", monkeypatch=monkeypatch) == 2
    assert "hint: realgraph plan runs/one/config.yaml --run runs/one" in capsys.readouterr().err


def test_a_run_directory_in_the_place_of_a_file_and_a_file_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    name = tmp_path.name
    assert typed("run", name, monkeypatch=monkeypatch) == 2
    assert f"hint: go on with this run: realgraph run --resume {name}; its" in capsys.readouterr().err
    assert typed("run", "--resume", f"{name}/checkpoints", monkeypatch=monkeypatch) == 2
    assert f"hint: name a run directory: {tmp_path}\n" in capsys.readouterr().err
    assert typed("run", "run.yaml", "--resume", name, monkeypatch=monkeypatch) == 2
    told = capsys.readouterr().err
    assert f"a resumed run has a run file of its own, {name}/config.yaml: it reads no 'run.yaml'" in told
    assert "hint: leave that out" in told


def test_the_name_of_a_library_graph_in_the_place_of_a_run_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("run", "grpo", monkeypatch=monkeypatch) == 2
    assert (
        "hint: a run file names this library graph: realgraph init --graph grpo writes one" in capsys.readouterr().err
    )
