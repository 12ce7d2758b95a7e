"""The check of words: names of every form, texts, places where a word is right, openings, and the list itself."""

from pathlib import Path

import pytest

from tests.check_words import HERE, hits, main, openings, read_words

WORDS = read_words("""
# a comment
wish -> constraint
at_home -> in_place
bare -> plain
    docs/* :: bare metal
    benchmarks/*
name told -> reported
""")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("wish = 1", ["wish"]),
        ("a_wish_of = 1", ["wish"]),
        ("class FirstWish:", ["wish"]),
        ("WISH_LIST = ()", ["wish"]),
        ("HTTPWish()", ["wish"]),
        ('"""What a Wish is."""', ["wish"]),
        ("swish(wished, wishes)", []),
        ("is_at_home(AtHome)", ["at_home"]),
        ("who is at home", []),
        ("a wish at_home", ["wish", "at_home"]),
        ("n_told = told(one)  # what it was told", ["told"]),
        ("a = 'told'  # told", []),
    ],
)
def test_words_are_found_in_names_and_texts_as_a_whole(line: str, found: list[str]) -> None:
    assert [hit.word.text for hit in hits(WORDS, "planner/a.py", line)] == found


def test_a_word_may_be_right_in_a_place() -> None:
    assert not list(hits(WORDS, "docs/a.md", "runs on bare metal"))
    assert len(list(hits(WORDS, "docs/a.md", "a bare list"))) == 1
    assert not list(hits(WORDS, "benchmarks/a.py", "bare = 1"))
    assert len(list(hits(WORDS, "tests/a.py", "bare = 1"))) == 1


def test_hits_are_listed_with_file_and_line_and_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("clash -> conflict\n")
    root = tmp_path / "root"
    (root / "planner").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "planner" / "a.py").write_text("a = 1\nb = clash(a)\n")
    (root / "docs" / "a.md").write_text("Two pins conflict.\n")
    (root / "planner" / "a.bin").write_text("clash\n")
    (root / "CHANGELOG.md").write_text("clash is conflict now\n")
    assert main([str(words), str(root)]) == 1
    assert capsys.readouterr().out == "planner/a.py:2: 'clash' is not the field's word: conflict\n"
    (root / "planner" / "a.py").write_text("b = conflict(1)\n")
    assert main([str(words), str(root)]) == 0
    assert capsys.readouterr().out == ""


OPENED = '''"""{0} module."""
async def f():
    """
    {0} function.
    """
    class A:
        """{0}"""
        def g(self):
            "Say {0}."
            return """{0}"""
'''


def test_docstrings_of_every_kind_open_with_the_thing_or_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one.line for one in openings("a.py", OPENED.format("Whether"))] == [1, 3, 7]
    for word in ("Whatnot", "However", "Office", "Off-policy", "[T]", ""):
        assert not list(openings("a.py", OPENED.format(word)))
    (tmp_path / "words.txt").touch()
    (tmp_path / "a.py").write_text(OPENED.format("What"))
    assert main([str(tmp_path / "words.txt"), str(tmp_path)]) == 1
    expected = "the docstring opens with 'What', not with the thing or the verb"
    assert capsys.readouterr().out.splitlines() == [f"a.py:{line}: {expected}" for line in (1, 3, 7)]


@pytest.mark.parametrize("text", ["wish", "wish ->", "    docs/* :: before any word\n", "-> constraint"])
def test_a_line_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        read_words(text)


def test_the_list_can_be_read_and_names_no_word_twice() -> None:
    names = [word.text for word in read_words((HERE / "words.txt").read_text())]
    assert len(names) == len(set(names)) >= 12
