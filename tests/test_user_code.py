"""Checks of the user's functions: modules are found and read, and none is imported."""

import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.graphs.source import Absent, Definition, binding_error, look_up
from realgraph.run_file.compose import check_run
from realgraph.run_file.user_code import functions_folder
from tests.run_texts import place, refused

__all__ = ["place"]

MODULE = """
import os
raise SystemExit("check must not import this")

def score(text, answer, strict):
    return 1.0

def scaled(batch, running, factor):
    return running * factor

def term(batch, outputs, *, weight=1.0):
    return weight * outputs.logprobs

async def later(batch, running): ...

WEIGHT = 3
half = lambda batch, running: running / 2

class Judge:
    def score(self, text): ...
    @staticmethod
    def best(text, answer, strict): ...
"""
STEP = "calls.advantage.steps.own={{kind: apply, fn: '{}'{}}}"
TERM = "calls.train.loss.terms.own={{kind: apply, fn: '{}'{}}}"
REWARD = "calls.reward.fn={}"


@pytest.fixture
def mine(place: Path) -> Path:
    (place / "mine.py").write_text(MODULE)
    (place / "broken.py").write_text("def score(text:\n")
    (place / "parts").mkdir()
    (place / "parts" / "__init__.py").write_text("raise SystemExit('no')\nfrom .inner import score as again\n")
    (place / "parts" / "inner.py").write_text("def score(text, answer, strict): ...\n")
    (place / "bare").mkdir()
    return place


@pytest.mark.parametrize(
    ("override", "path", "text", "hint"),
    [
        (REWARD.format("absent:score"), "reward.fn", "there is no module 'absent'", "expected absent.py in "),
        (REWARD.format("my_reward:score"), "reward.fn", "there is no module 'my_reward'", "mean 'my_rewards'?"),
        (REWARD.format("parts.iner:score"), "reward.fn", "no module 'parts.iner'", "did you mean 'parts.inner'?"),
        (REWARD.format("mine.inner:score"), "reward.fn", "'mine' is a module, not a package", ""),
        (REWARD.format("mine.py:score"), "reward.fn", "can't find the module", "did you mean 'mine:score'?"),
        (REWARD.format("./parts/inner.py:score"), "reward.fn", "module:function", "did you mean 'parts.inner:score'?"),
        (REWARD.format("mine.score"), "reward.fn", "of the form module:function", "did you mean 'mine:score'?"),
        (REWARD.format("mine:score()"), "reward.fn", "of the form module:function", "did you mean 'mine:score'?"),
        (TERM.format("mine.py:term", ""), "train.loss.terms.own.fn", "can't find the", "did you mean 'mine:term'?"),
        (
            TERM.format("lib/mine.py:term", ""),
            "train.loss.terms.own.fn",
            "of the form",
            "did you mean 'lib.mine:term'?",
        ),
        (REWARD.format("bare:score"), "reward.fn", "'bare' is a folder of modules", ""),
        (REWARD.format("broken:score"), "reward.fn", "broken.py:1 is not valid Python: ", ""),
        (REWARD.format("mine:scor"), "reward.fn", "mine.py defines no 'scor'", "did you mean 'score'?"),
        (REWARD.format("mine:Judge.scores"), "reward.fn", "mine.py defines no 'Judge.scores'", "did you mean 'score'?"),
        (REWARD.format("mine:WEIGHT"), "reward.fn", "it is a plain value, not a function", ""),
        (
            REWARD.format("mine:scaled"),
            "reward.fn",
            "but is defined with (batch, running, factor)",
            "'batch' is not in",
        ),
        (STEP.format("mine:scald", ""), "advantage.steps.own.fn", "defines no 'scald'", "did you mean 'scaled'?"),
        (
            STEP.format("mine:scaled", ""),
            "advantage.steps.own.fn",
            "missing a required argument: 'factor'",
            "called as",
        ),
        (
            STEP.format("mine:scaled", ", args: {facter: 2}"),
            "advantage.steps.own.fn",
            "(mine.py:8)",
            "did you mean 'factor'?",
        ),
        (STEP.format("mine:later", ""), "advantage.steps.own.fn", "it is async, and a step or term is a plain", ""),
        (STEP.format("exact_match", ""), "advantage.steps.own.fn", "not of the form module:function", ""),
        (STEP.format("mine:half", ", reads: [lenght]"), "advantage.steps.own.reads[0]", "no call writes 'lenght'", ""),
        (STEP.format("mine:half", ", reads: [text]"), "advantage.steps.own.reads[0]", "'text' is sample text", ""),
        (TERM.format("mine:trem", ""), "train.loss.terms.own.fn", "defines no 'trem'", "did you mean 'term'?"),
        (TERM.format("mine:term", ", args: {wieght: 2}"), "train.loss.terms.own.fn", "'wieght'", "mean 'weight'?"),
        (TERM.format("mine:term", ", reads: [rewrad]"), "train.loss.terms.own.reads[0]", "'rewrad'", "mean 'reward'?"),
        (
            TERM.format("mine:term", ", reads: [values]"),
            "train.loss.terms.own.reads[0]",
            "not an output of the trained",
            "",
        ),
    ],
)
def test_a_function_that_can_not_work_is_found_without_importing_it(
    mine: Path, monkeypatch: pytest.MonkeyPatch, override: str, path: str, text: str, hint: str
) -> None:
    monkeypatch.chdir(mine)
    before = set(sys.modules)
    (problem,) = refused(mine, override)
    assert problem.where.path == f"$.calls.{path}"
    assert problem.where.file == "command line"
    assert text in problem.text.replace(str(mine) + "/", "")
    assert hint in problem.hint
    assert not {"mine", "parts", "parts.inner", "broken"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    "override",
    [
        REWARD.format("mine:score"),
        REWARD.format("mine:Judge.best"),  # a decorator may change the parameters: nobody knows
        REWARD.format("parts:again"),
        REWARD.format("parts:inner.score"),  # importing a part makes it a name of its package
        REWARD.format("parts.inner:score"),
        REWARD.format("os.path:exists"),  # a module that another puts in place
        STEP.format("mine:half", ""),
        STEP.format("mine:scaled", ", args: {factor: 2}"),
        TERM.format("mine:term", ", reads: [reward, entropy], args: {weight: 2}"),
    ],
)
def test_what_may_work_is_not_refused(mine: Path, override: str) -> None:
    check_run(mine / "run.yaml", [override])


def test_all_mistakes_of_functions_come_at_once_and_calls_that_are_off_need_none(mine: Path) -> None:
    several = [REWARD.format("absent:f"), STEP.format("mine:scald", ""), TERM.format("mine:trem", "")]
    assert len(refused(mine, *several)) == 3
    off = "calls.more={kind: function, fn: 'absent:f', reads: [text], writes: {more: sample float32}, when: false}"
    check_run(mine / "run.yaml", [off])


def test_the_functions_of_a_run_directory_are_those_of_the_run_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    assert functions_folder(config) == tmp_path
    (tmp_path / "job.json").write_bytes(msgspec.json.encode({"user_dir": "/somewhere/else", "plan": {}}))
    assert functions_folder(config) == Path("/somewhere/else")
    assert functions_folder(tmp_path / "other.yaml") == tmp_path
    (tmp_path / "job.json").write_text("{")
    assert functions_folder(config) == tmp_path


# --- reading a text ---------------------------------------------------------------------------------------------------

SOURCES: dict[str, type[Any] | None] = {
    "f = 1\ndef f(a): ...": Definition,
    "if True:\n    def f(a): ...\nelse:\n    f = None": Definition,
    "try:\n    from x import f\nexcept ImportError:\n    def f(a): ...": Definition,
    "with open('x') as f: ...": Definition,
    "for f in (): ...": Definition,
    "(f := 3)": Definition,
    "from x import *": None,
    "def __getattr__(name): ...": None,
    "globals()['f'] = 3": None,
    "def g():\n    f = 1": Absent,
    "class A:\n    def f(self): ...": Absent,
    "g = [f for f in ()]\nx = lambda f: f": Absent,
    "": Absent,
}


@pytest.mark.parametrize("source", SOURCES)
def test_names_are_found_where_a_module_binds_them(source: str) -> None:
    found = look_up(source, "f")
    assert (type(found) if found is not None else None) == SOURCES[source]


_NAMES = ("a", "b", "c", "d")


@st.composite
def _functions(draw: st.DrawFn) -> str:
    """The head of a function with up to four parameters of every kind."""
    kinds = sorted(draw(st.lists(st.sampled_from("pkwx"), max_size=4)), key="pkwx".index)
    kinds = [kind for i, kind in enumerate(kinds) if kind not in "x" or kind not in kinds[:i]]
    parts: list[str] = []
    optional = False
    for name, kind, after in zip(_NAMES, kinds, [*kinds[1:], ""], strict=False):
        optional = (optional or draw(st.booleans())) if kind in "pk" else draw(st.booleans())
        if kind == "w" and "*" not in parts:
            parts.append("*")
        parts.append(f"**{name}" if kind == "x" else f"{name}=1" if optional else name)
        if kind == "p" and after != "p":
            parts.append("/")
    return f"def f({', '.join(parts)}): ..."


@given(_functions(), st.integers(0, 2), st.sets(st.sampled_from((*_NAMES, "z"))))
@settings(max_examples=300)
def test_what_the_text_says_of_a_call_is_what_python_says(source: str, n_positional: int, keywords: set[str]) -> None:
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - heads of functions, drawn above
    definition = look_up(source, "f")
    assert isinstance(definition, Definition) and definition.signature is not None
    given_positional = ("batch", "running")[:n_positional]
    try:
        inspect.signature(scope["f"]).bind(*given_positional, **dict.fromkeys(keywords))
        fits = True
    except TypeError:
        fits = False
    assert (binding_error(definition.signature, given_positional, sorted(keywords)) == "") == fits
