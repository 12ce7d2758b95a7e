"""The two truths about the repository's layout agree, and imports run one way, from the command line down to graphs."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"graphs": 0, "planner": 1, "runtime": 2, "": 3}
# Inside the planner: what every part shares, then the parts, each of which may import those of a smaller number.
PARTS = {"": 0, "costs": 1, "solve": 1, "bare": 1, "space": 2, "search": 3, "report": 4}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "transformers", "datasets", "sglang", "accelerate"}


def sources() -> Iterator[tuple[str, Path]]:
    """(floor, file) of every module of ours."""
    for part in ("graphs", "planner", "runtime", "configs", "realgraph"):
        for path in sorted((ROOT / part).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            yield ("" if part in ("realgraph", "configs") else part), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"{path}: relative import")


@pytest.mark.parametrize(("floor", "path"), list(sources()), ids=lambda value: getattr(value, "name", value))
def test_a_module_imports_only_from_its_floor_or_below(floor: str, path: Path) -> None:
    for module in imported(path):
        parts = module.split(".")
        assert parts[0] not in FLOORS, f"{path}: import realgraph.{module}"
        if parts[0] == "realgraph" and len(parts) > 1:
            target = parts[1] if parts[1] in FLOORS else ""
            assert FLOORS[target] <= FLOORS[floor], f"{path} imports {module}"


def part_of(module: str) -> str:
    """Of a module of the planner, the sub-package that holds it; "" for those that all share."""
    inner = module.split(".")[2]
    return inner if inner in PARTS else ""


PLANNER = sorted((ROOT / "planner").rglob("*.py"))


@pytest.mark.parametrize("path", PLANNER, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_inside_the_planner_run_one_way(path: Path) -> None:
    own = path.parent.name if path.parent.name in PARTS else ""
    for module in imported(path):
        if module.startswith("realgraph.planner."):
            other = part_of(module)
            assert other == own or PARTS[other] < PARTS[own], f"{path} imports {module}"


@pytest.mark.parametrize("part", ["graphs", "planner", "runtime", "configs"])
def test_links_and_package_table_agree(part: str) -> None:
    link = ROOT / "realgraph" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"realgraph.{part}"] == part
    assert f"realgraph.{part}" in PROJECT["tool"]["setuptools"]["packages"]


def test_every_folder_with_modules_is_packaged() -> None:
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    for name, folder in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            inner = path.parent.relative_to(ROOT / folder).parts
            assert ".".join((name, *inner)) in packages, f"{path} is in no package"


@pytest.mark.parametrize("path", [path for _, path in sources()], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


LIGHT = ("realgraph.cli", "realgraph.compose", "realgraph.planner.search.search", "realgraph.runtime.scheduler")


@pytest.mark.parametrize("module", LIGHT)
def test_the_light_floors_import_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(','.join(sorted(set(sys.modules) & {HEAVY!r})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
