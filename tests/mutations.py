"""Small damage to valid inputs: bytes, the structure of YAML and JSON, rows of data, and words of a command line."""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

Tree = Any
Path = tuple[str | int, ...]

BYTES = (b"\0", b"\x1b[31m", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\x07", b"\xc2\x85", b"\n{")
ROWS = (b"\n", b"[]\n", b"3\n", b"{}\n", b"{\n", b"\xff\n", b"null\n", b'{"prompt": 1e999}\n')
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    -0.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    10**6,
    2**31,
    2**63,
    10**400,
    "",
    " ",
    ".",
    "../../x",
    "/nowhere/x",
    "a\nb",
    "x" * 5000,
    ":pick:",
    "[bold]",
    "${params.nothing}",
    "${",
    "${oc.env:HOME}",
    "\x1b[2J",
    "\u202e",
    "nan",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"kind": "nothing"},
    [1, 2, 3] * 50,
)


def damaged_bytes(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """One flip, cut, insertion or copy of a span somewhere in the file."""
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice((1, 1, 2, 10, 200)))
    match rng.choice(("flip", "delete", "insert", "truncate", "duplicate", "empty")):
        case "flip" if at < len(content):
            flipped = content[at] ^ (1 << rng.randrange(8))
            return content[:at] + bytes([flipped]) + content[at + 1 :], f"a bit of byte {at}"
        case "delete":
            return content[:at] + content[end:], f"bytes {at} to {end} deleted"
        case "insert":
            what = rng.choice(BYTES)
            return content[:at] + what + content[at:], f"{what!r} inserted at {at}"
        case "truncate":
            return content[:at], f"cut to {at} bytes"
        case "duplicate":
            return content[:end] + content[at:end] * rng.choice((1, 3)) + content[end:], f"bytes {at} to {end} repeated"
        case _:
            return b"", "empty"


def places(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """The path of every value but the whole."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(tree: Tree, path: Path) -> Tree:
    """The value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def damaged_tree(rng: random.Random, tree: Tree) -> tuple[Tree, str]:
    """One key dropped or misspelt, one value replaced, swapped, nested or added, in a copy of the tree."""
    tree = json.loads(json.dumps(tree))
    known = list(places(tree))
    if not known:
        return rng.choice(VALUES), "the whole replaced"
    path = rng.choice(known)
    parent, key, shown = at(tree, path[:-1]), path[-1], ".".join(map(str, path))
    value = parent[key]
    match rng.choice(("drop", "misspell", "value", "value", "value", "value", "swap", "nest", "double")):
        case "drop":
            del parent[key]
            return tree, f"{shown} dropped"
        case "misspell" if isinstance(key, str):
            name = misspelt(rng, key)
            parent[name] = parent.pop(key)
            return tree, f"{shown} spelt {name!r}"
        case "swap":
            other = rng.choice(known)
            if other[: len(path)] != path and path[: len(other)] != other:
                parent[key], at(tree, other[:-1])[other[-1]] = at(tree, other), value
            return tree, f"{shown} and {other} swapped"
        case "nest":
            deep = rng.choice((1, 40, 900))
            for _ in range(deep):
                value = [value] if rng.random() < 0.5 else {"x": value}
            parent[key] = value
            return tree, f"{shown} nested {deep} deep"
        case "double" if isinstance(parent, list):
            parent.append(value)
            return tree, f"{shown} twice"
        case "double":
            parent[f"{key}_2"] = value
            return tree, f"{shown} copied to {key}_2"
        case _:
            new = (
                number_near(rng, value) if isinstance(value, int | float) and rng.random() < 0.5 else rng.choice(VALUES)
            )
            parent[key] = new
            return tree, f"{shown} = {new!r:.60}"


def number_near(rng: random.Random, value: float) -> float:
    """A number of the same kind, too small, too large or odd."""
    found: float = rng.choice((0, -value, value + 1, value * 1000, value - 1, value + 0.5, -1, float("nan"), -1e300))
    return found


def misspelt(rng: random.Random, word: str) -> str:
    """One letter lost, doubled or changed."""
    at_letter = rng.randrange(len(word)) if word else 0
    letter = rng.choice(("", "x", word[at_letter : at_letter + 1] * 2, "\x1b", " ", "é"))
    return word[:at_letter] + letter + word[at_letter + 1 :]


def yaml_text(tree: Tree) -> bytes:
    """YAML with aliases and non-finite numbers as YAML writes them."""
    try:
        return yaml.dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except RecursionError:
        return json_text(tree)


def json_text(tree: Tree) -> bytes:
    """JSON, with NaN and Infinity as Python writes them."""
    try:
        return json.dumps(tree, indent=1).encode()
    except RecursionError:
        return b"[" * 2000


def damaged_yaml(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The structure four times of five, else the bytes."""
    if rng.random() < 0.2:
        return damaged_bytes(rng, content)
    tree, what = damaged_tree(rng, yaml.safe_load(content))
    return yaml_text(tree), what


def damaged_json(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """The structure four times of five, else the bytes."""
    if rng.random() < 0.2:
        return damaged_bytes(rng, content)
    tree, what = damaged_tree(rng, json.loads(content))
    return json_text(tree), what


def damaged_rows(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """JSON lines: one row's structure, a row that is none, or the bytes."""
    lines = content.splitlines(keepends=True)
    at_row = rng.choice((0, rng.randrange(len(lines))))
    match rng.choice(("row", "row", "all", "line", "bytes", "huge", "gzip")):
        case "row":
            tree, what = damaged_tree(rng, json.loads(lines[at_row]))
            lines[at_row] = json.dumps(tree).encode() + b"\n"
            return b"".join(lines), f"row {at_row}: {what}"
        case "all":
            column = rng.choice(sorted(json.loads(lines[0])))
            rows = [json.loads(line) for line in lines]
            value = rng.choice(VALUES)
            for row in rows:
                row[column] = value
            return b"".join(json.dumps(row).encode() + b"\n" for row in rows), f"{column} = {value!r:.40} in all rows"
        case "line":
            lines[at_row] = rng.choice(ROWS)
            return b"".join(lines), f"row {at_row}: {lines[at_row]!r}"
        case "huge":
            lines[at_row] = json.dumps({"prompt": "9" * 300_000, "answer": "1"}).encode() + b"\n"
            return b"".join(lines), f"row {at_row}: 300,000 characters"
        case "gzip":
            return gzip.compress(content)[: rng.choice((20, 10**9))], "compressed, under the name of what is not"
        case _:
            return damaged_bytes(rng, content)


ODD = ("", " ", "\x1b[31mx", "=", "x=", "=x", "a.b.c=1", "--", "-", "--nothing", "x" * 20_000, "\udcff")
WORDS = (*ODD, "nan", "-1", "0", "1e400")


def damaged_words(rng: random.Random, words: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """One word dropped, misspelt, replaced or added, or two in each other's place."""
    found, i = list(words), rng.randrange(len(words))
    match rng.choice(("drop", "misspell", "replace", "add", "swap")):
        case "drop":
            del found[i]
        case "misspell":
            found[i] = misspelt(rng, found[i]).replace("\0", "")
        case "replace":
            found[i] = rng.choice(WORDS)
        case "add":
            found.insert(i + rng.randrange(2), rng.choice(WORDS))
        case _:
            j = rng.randrange(len(words))
            found[i], found[j] = found[j], found[i]
    return tuple(found), " ".join(found)[:80]


Damage = Callable[[random.Random, bytes], tuple[bytes, str]]


def mutate(content: bytes, rng: random.Random, without: bytes = b"") -> bytes:
    """Another content, by one to three changes of JSON or of bytes. without: bytes that it does not get."""
    changed = content
    while changed == content:
        for _ in range(rng.randint(1, 3)):
            try:
                changed, _ = damaged_json(rng, changed)
            except (ValueError, RecursionError):  # it is no JSON any more
                changed, _ = damaged_bytes(rng, changed)
        changed = changed.translate(None, without)
    return changed
