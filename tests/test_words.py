"""Text that reaches the screen: data as they are, control characters shown, and output that nobody takes."""

import ast
import io
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from realgraph.commands.init import init_command
from realgraph.graphs.errors import ConfigError
from realgraph.runtime.master.observer import EvalRecord, Note, Observers, RunEnded, RunRecord, RunStarted, StepRecord
from realgraph.screen.console import EvaluationLines, LiveScreen, PlainLines
from realgraph.screen.output import say_json_text, visible
from realgraph.screen.terminal import Terminal
from tests.console_script import typed
from tests.graph_texts import GRAPH

ROOT = Path(__file__).parent.parent
EVIL = "tasks:pick [bold]x[/] \x1b]0;owned\x1b[31mred\x9b2J\u202e\ud800 [/nothing]"
SHOWN = r"tasks:pick [bold]x[/] \x1b]0;owned\x1b[31mred\x9b2J\u202e\ud800 [/nothing]"


def screen() -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(file=out, width=200), out


def safe(text: str) -> bool:
    """Nothing that a terminal would obey, and nothing that it can't encode."""
    text.encode()
    return all(character.isprintable() or character in "\n\t" or ord(character) >= 0xA0 for character in text)


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=200)
def test_no_text_reaches_the_terminal_with_a_control_character(text: str) -> None:
    shown = visible(text)
    assert safe(shown)
    assert visible(shown) == shown
    if text.isprintable():
        assert shown == text
    terminal, out = screen()
    terminal.print(text)
    terminal.print(Text(text, style="bold"))
    assert safe(out.getvalue())


def test_data_are_no_markup_no_emoji_and_no_escape_codes_anywhere_on_a_console() -> None:
    terminal, out = screen()
    terminal.print(EVIL)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    terminal.print(table)
    terminal.rule(Text(EVIL))
    assert out.getvalue().count(SHOWN) == 5
    assert safe(out.getvalue())


def records(name: str) -> list[RunRecord]:
    started = RunStarted(name, "", 2, 0, name, (name,), {}, 0.0)
    return [
        started,
        StepRecord(1, 1.0, {f"{name}/seconds": 0.5, "reward/reward": 1.0}),
        EvalRecord(2, {name: 1.0}),
        Note(name),
        RunEnded(2, name, False),
    ]


@pytest.mark.parametrize("kind", [PlainLines, LiveScreen])
def test_a_run_shows_names_and_texts_as_they_are(kind: type[PlainLines | LiveScreen]) -> None:
    terminal, out = screen()
    view = kind(terminal)
    for record in records(EVIL):
        view.observe(record)
    view.close()
    assert safe(out.getvalue())
    assert "⛏" not in out.getvalue()
    assert out.getvalue().count(SHOWN) >= 4


def test_problems_show_control_characters_of_what_they_quote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed("check", str(tmp_path / "a\x1b[2J.yaml"), monkeypatch=monkeypatch) == 2
    assert typed("graph", "\x1b]0;x\x07", monkeypatch=monkeypatch) == 2
    assert typed("plan", "--\x1b[31m", monkeypatch=monkeypatch) == 2
    (tmp_path / "g.yaml").write_text(GRAPH + '\n"\\e[2J:pick:": [bold]\n')
    assert typed("check", str(tmp_path / "g.yaml"), monkeypatch=monkeypatch) == 2
    err = capfd.readouterr().err
    assert safe(err)
    assert err.count(r"\x1b") >= 4
    assert ":pick:" in err


def test_json_on_a_terminal_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"a": "\x9b\u202e\x7f\x1b"}, ensure_ascii=False)
    say_json_text(text)
    out = capsys.readouterr().out
    assert safe(out)
    assert json.loads(out) == {"a": "\x9b\u202e\x7f\x1b"}


def test_everything_printed_goes_through_the_two_modules_that_show_control_characters() -> None:
    """No `print`, no `sys.stdout.write` and no console of rich anywhere else."""
    found = []
    for file in sorted((ROOT / "realgraph").glob("*.py")):
        if file.name in ("output.py", "terminal.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("print", "Console", "typer.echo") or name.startswith(("sys.stdout.", "sys.stderr.")):
                    found.append(f"{file.name}:{node.lineno}: {name}")
    assert found == []


def test_the_help_has_no_emoji(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "plan", "run", "eval", "generate", "graph", "init", "profile", "quickstart", "schema"):
        assert typed(command, "--help", monkeypatch=monkeypatch) == 0
    assert all(ord(character) < 0x2600 for character in capsys.readouterr().out)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"realgraph {version('realgraph')}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plan", "--sed", "3"], "command line: --sed: no such option: --sed"),
        (["check"], "command line: FILE: missing"),
        (["chekc"], "command line: realgraph: no such command 'chekc'. Did you mean 'check'?"),
        (["generate", "x", "y", "--temperature=-1"], "command line: --temperature: "),
        (["plan", "x", "--time-limit", "soon"], "command line: --time-limit: "),
        (["plan", "x", "--seed", "any one"], "command line: --seed: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_names_its_option(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(*arguments, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert "\n  hint: " in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["graphs"], ["graph", "grpo"], ["init"], ["check", "FILE", "--json"]]
)
def test_output_that_nobody_takes_ends_with_1_and_a_line_where_the_disk_is_full(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "graph.yaml").write_text(GRAPH)
    words = [str(tmp_path / "graph.yaml") if word == "FILE" else word for word in arguments]
    command = [sys.executable, "-m", "realgraph.cli", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "standard output: can't be written to: No space left on device\n",
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=90, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_closed_streams_and_an_encoding_without_the_characters_are_no_crash(tmp_path: Path) -> None:
    command = f"{sys.executable} -m realgraph.cli"
    for shell, code in (
        (f"{command} graph grpo >&-", 0),
        (f"{command} check nowhere 2>&-", 2),
        (f"{command} check nowhere 2>/dev/full", 2),
        (f"PYTHONIOENCODING=ascii {command} graph grpo", 0),
    ):
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=90, check=False)
        assert (done.returncode, done.stderr) == (code, ""), shell


def test_an_evaluation_says_the_step_of_its_weights() -> None:
    terminal, out = screen()
    seen: list[RunRecord] = []

    class Watcher:
        def observe(self, record: RunRecord) -> None:
            seen.append(record)

        def close(self) -> None: ...

    observers = Observers((EvaluationLines(terminal, "runs/x, after step 40"), Watcher()), begun_at=40)
    observers.observe(RunStarted("x", 0, 0, 0, "runs/x-eval", (), {}, 0.0))  # type: ignore[arg-type]
    observers.observe(EvalRecord(0, {"accuracy": 0.25}))
    observers.observe(RunEnded(0, "finished", True))
    assert "runs/x, after step 40: accuracy 0.25" in out.getvalue()
    assert "step 0" not in out.getvalue()
    assert [record.step for record in seen if isinstance(record, EvalRecord | RunEnded)] == [40, 40]


def test_a_new_run_file_names_a_schema_that_lies_beside_it(tmp_path: Path) -> None:
    init_command("grpo", tmp_path / "run.yaml")
    first = (tmp_path / "run.yaml").read_text().splitlines()[0]
    marker, _, name = first.partition("$schema=")
    assert marker == "# yaml-language-server: "
    assert (tmp_path / name).read_text() == (ROOT / "docs" / "realgraph.schema.json").read_text()
    init_command("ppo", tmp_path / "ppo.yaml")  # the schema is ours: written anew
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is not a schema of realgraph"):
        init_command("sft", tmp_path / "sft.yaml")
    assert not (tmp_path / "sft.yaml").exists()


SHOWN_RUN = """
from realgraph.screen.output import standard_streams
from realgraph.screen.terminal import run_terminal
with standard_streams():
    console = run_terminal()
    for step in range(3):
        console.print(f"step {step}")
    open("done", "w").close()
"""


def test_a_run_goes_on_where_nobody_takes_what_it_shows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOWN_RUN]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=90, check=False
        )
    warning = "warning: standard output can't be written to (No space left on device): the run goes on without it\n"
    assert (done.returncode, done.stderr) == (0, warning)
    (tmp_path / "done").unlink()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=90, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "done").exists()


CHILD_OF_CLOSED = """
import subprocess, sys
from realgraph.screen.output import say, standard_streams
with standard_streams():
    say("nobody hears this")
    own = open("own", "w")
    words = "import sys; print('spilt'); sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    own.write(str(subprocess.run([sys.executable, "-c", words]).returncode))
"""


def test_streams_that_were_closed_before_the_start_lead_nowhere_for_children_too(tmp_path: Path) -> None:
    """As of `realgraph run FILE <&- >&- 2>&-`: what a child prints is not written into a file of the run."""
    (tmp_path / "run.py").write_text(CHILD_OF_CLOSED)
    command = ["sh", "-c", '"$0" run.py <&- >&- 2>&-', sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=90, check=False).returncode == 0
    assert (tmp_path / "own").read_text() == "0"
