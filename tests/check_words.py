"""Words that are not the field's, listed with file and line: `python tests/check_words.py [WORDS [ROOT]]`.

The list is words.txt beside this script. Docstrings that open with a word like What or Whether, and not with the
thing or the verb, are listed too. Exits with 1 where anything is found, with 0 where nothing is.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence, Set
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FOLDERS = ("graphs", "planner", "runtime", "realgraph", "configs", "docs", "benchmarks", "tests")
ENDINGS = {".py", ".md", ".yaml", ".html"}
# The history says what was; results are what a machine wrote; this list and its test have to name the words.
LEFT_OUT = ("CHANGELOG.md", "benchmarks/results/*", "tests/check_words.py", "tests/test_check_words.py")
OPENINGS = (
    "what",
    "whatever",
    "whether",
    "how",
    "of",
    "where",
    "wherever",
    "when",
    "whenever",
    "why",
    "who",
    "which",
    "whose",
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


class Word(NamedTuple):
    """A word that is not the field's."""

    text: str
    instead: str
    in_names: bool  # it is right in texts
    right: tuple[tuple[str, re.Pattern[str]], ...]  # globs of files, each with the lines where the word is right

    def is_right(self, file: str, line: str) -> bool:
        """True where the list allows the word in this line."""
        return any(fnmatch(file, glob) and pattern.search(line) for glob, pattern in self.right)


class Hit(NamedTuple):
    """A word in a line of a file."""

    file: str
    line: int  # from 1
    word: Word

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word.text!r} is not the field's word: {self.word.instead}"


class Opening(NamedTuple):
    """A docstring that opens with one of OPENINGS."""

    file: str
    line: int  # from 1
    word: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: the docstring opens with {self.word!r}, not with the thing or the verb"


def read_words(text: str) -> tuple[Word, ...]:
    """The list. Raises ValueError for a line that is none of its forms."""
    words: list[Word] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            if not words:
                raise ValueError(f"line {number}: a place before the first word")
            glob, _, pattern = line.strip().partition(" :: ")
            place = (glob.strip(), re.compile(pattern))
            words[-1] = words[-1]._replace(right=(*words[-1].right, place))
            continue
        word, arrow, instead = line.partition(" -> ")
        if not arrow or not instead.strip():
            raise ValueError(f"line {number}: expected `word -> what to write instead`")
        name = word.strip().lower().removeprefix("name ")
        words.append(Word(name, instead.strip(), word.startswith("name "), ()))
    return tuple(words)


def parts(name: str) -> str:
    """`_at_home_` of `atHome`, `AT_HOME` and `at_home`: the words of a name, in small letters."""
    return "_" + "_".join(part.lower() for part in _PART.findall(name)) + "_"


def hits(words: Sequence[Word], file: str, text: str) -> Iterator[Hit]:
    """The words in a file, each once a line."""
    in_code = _names_in_code(text) if file.endswith(".py") else {}
    for number, line in enumerate(text.splitlines(), 1):
        names = {parts(name) for name in _NAME.findall(line)}
        own = in_code.get(number, frozenset())
        for word in words:
            found = any(f"_{word.text}_" in name for name in (own if word.in_names else names))
            if found and not word.is_right(file, line):
                yield Hit(file, number, word)


def _names_in_code(text: str) -> Mapping[int, Set[str]]:
    """The parts of the names in each line of Python code, without texts and comments."""
    names = dict[int, set[str]]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            names.setdefault(token.start[0], set()).add(parts(token.string))
    return names


def openings(file: str, text: str) -> Iterator[Opening]:
    """Docstrings of a Python file, its own included, that open with one of OPENINGS."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            word = _NAME.match(ast.get_docstring(node) or "")
            if word and word[0].lower() in OPENINGS:
                yield Opening(file, node.body[0].lineno, word[0])


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path below the root, text) of every file that is looked at, in order."""
    paths = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        below = root / folder
        paths += [p for p in below.rglob("*") if p.is_file() and not _is_linked(p, root)]
    for path in sorted(paths):
        file = path.relative_to(root).as_posix()
        if path.suffix in ENDINGS and not any(fnmatch(file, glob) for glob in LEFT_OUT):
            yield file, path.read_text("utf-8")


def _is_linked(path: Path, root: Path) -> bool:
    """True below a link: `realgraph/planner` is the folder `planner` once more."""
    return any(part.is_symlink() for part in (path, *path.parents) if part != root and part.is_relative_to(root))


def main(arguments: Sequence[str]) -> int:
    """Print all that is found; the exit code."""
    words = read_words(Path(arguments[0] if arguments else HERE / "words.txt").read_text("utf-8"))
    root = Path(arguments[1]) if len(arguments) > 1 else HERE.parent
    n_found = 0
    for file, text in sources(root):
        for found in (*hits(words, file, text), *(openings(file, text) if file.endswith(".py") else ())):
            print(found)
            n_found += 1
    return 1 if n_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
