"""The two truths about the repository's layout agree, and imports run one way, between layers and between packages."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"graphs": 0, "planner": 1, "runtime": 2, "": 3}
LARGEST_PACKAGE = 12  # modules
# Packages of the runtime by the processes that import them: those of the master's side reach no torch.
MASTER_SIDE = {"commands", "scheduler", "master", "preflight"}
BOTH_SIDES = {"wire", "job", "processes", "data", "functions"}
WORKER_SIDE = {
    *("worker", "store", "algorithms", "attention", "cpu", "models", "parallel", "train", "generate", "profile"),
}
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
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{name.name}" for name in names)
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


def package_of(path: Path) -> str:
    """The folder of a module, as its package is imported."""
    inner = path.parent.relative_to(ROOT).parts
    return ".".join(inner if inner[0] == "realgraph" else ("realgraph", *inner))


def imports_between_packages() -> nx.DiGraph:
    """Packages, and an edge from each to those that its modules import; each edge with the first such module."""
    owner = {f"{package_of(path)}.{path.stem}": package_of(path) for _, path in sources()}
    edges: nx.DiGraph = nx.DiGraph()
    for _, path in sources():
        package = package_of(path)
        edges.add_node(package)
        for module in imported(path):
            # `from package import module` names a module too; what is neither lies outside
            target = owner.get(module)
            if target is not None and target != package:
                edges.add_edge(package, target, module=str(path.relative_to(ROOT)))
    return edges


def test_imports_between_packages_have_no_cycle() -> None:
    edges = imports_between_packages()
    cycles = [sorted(part) for part in nx.strongly_connected_components(edges) if len(part) > 1]
    inside = [(a, b, edges.edges[a, b]["module"]) for part in cycles for a, b in edges.subgraph(part).edges]
    assert not cycles, inside


@pytest.mark.parametrize("package", sorted(MASTER_SIDE))
def test_packages_of_the_master_import_none_of_the_workers(package: str) -> None:
    edges = imports_between_packages()
    reached = {
        name.removeprefix("realgraph.runtime.") for name in nx.descendants(edges, f"realgraph.runtime.{package}")
    }
    assert not reached & WORKER_SIDE


def test_every_package_of_the_runtime_has_a_side() -> None:
    names = {
        package_of(path).removeprefix("realgraph.runtime") for _, path in sources() if path.parts[-3:-2] == ("runtime",)
    }
    assert {name.removeprefix(".") for name in names} == MASTER_SIDE | WORKER_SIDE | BOTH_SIDES


def test_a_package_has_at_most_twelve_modules() -> None:
    counts = Counter(package_of(path) for _, path in sources() if path.name != "__init__.py")
    assert {package: n for package, n in counts.items() if n > LARGEST_PACKAGE} == {}


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


LIGHT = (
    "realgraph.cli",
    "realgraph.run_file.compose",
    "realgraph.planner.search.search",
    "realgraph.runtime.scheduler.scheduler",
    "realgraph.runtime.master.master",
)


@pytest.mark.parametrize("module", LIGHT)
def test_the_light_floors_import_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(','.join(sorted(set(sys.modules) & {HEAVY!r})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
