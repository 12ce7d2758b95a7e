"""The two truths about the repository's layout agree, the marks of its structure hold, and imports run one way."""

import statistics
import subprocess
import sys
import tomllib

import pytest

from tests import marks
from tests.marks import ROOT

LARGEST_FILE = 400  # lines
MEDIAN_FILE = 150  # lines
LONGEST_FUNCTION = 60  # lines
LONG_FUNCTION = 30  # lines; 95 % of the functions have no more
LARGEST_PACKAGE = 12  # modules
# Packages of the runtime by the processes that import them: those of the master's side reach no torch.
MASTER_SIDE = {"commands", "scheduler", "master", "preflight", "hosts", "clusters", "replacement"}
BOTH_SIDES = {"wire", "job", "processes", "data", "files", "functions"}
WORKER_SIDE = {
    *("worker", "store", "algorithms", "attention", "cpu", "models", "parallel", "train", "generate", "profile"),
    *("memory", "doctor", "rollout", "weights", "drawn"),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "transformers", "datasets", "sglang", "accelerate"}


# --- imports ----------------------------------------------------------------------------------------------------------


def test_a_module_imports_only_from_its_layer_or_below() -> None:
    assert [f"{one.source.file} imports {one.module}" for one in marks.upward_imports()] == []


def test_imports_between_layers_and_packages_have_no_cycle() -> None:
    assert marks.cycles(marks.layer_imports()) == []
    edges = marks.package_imports()
    cycles = marks.cycles(edges)
    inside = [(a, b, file) for (a, b), file in edges.items() if any(a in one and b in one for one in cycles)]
    assert inside == []


def test_a_cycle_is_found() -> None:
    assert marks.cycles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d"), ("e", "f")]) == [
        ["a", "b", "c"],
        ["d", "e"],
    ]


@pytest.mark.parametrize("package", sorted(MASTER_SIDE))
def test_packages_of_the_master_import_none_of_the_workers(package: str) -> None:
    reached = marks.reached(marks.package_imports(), f"realgraph.runtime.{package}")
    assert not {name.removeprefix("realgraph.runtime.") for name in reached} & WORKER_SIDE


def test_every_package_of_the_runtime_has_a_side() -> None:
    names = {
        source.package.split(".", 2)[2]
        for source in marks.production()
        if source.package.count(".") == 2 and source.layer == "runtime"
    }
    assert names == MASTER_SIDE | WORKER_SIDE | BOTH_SIDES


# --- sizes and names --------------------------------------------------------------------------------------------------


def test_files_stay_small() -> None:
    sizes = marks.file_sizes()
    assert {file: n for file, n in sizes.items() if n > LARGEST_FILE} == {}
    assert statistics.median(sizes.values()) <= MEDIAN_FILE


def test_functions_stay_short() -> None:
    sizes = marks.function_sizes()
    assert {str(place): n for place, n in sizes.items() if n > LONGEST_FUNCTION} == {}
    assert marks.percentile(sizes.values(), 0.95) <= LONG_FUNCTION


def test_a_percentile_is_a_value_that_the_share_does_not_exceed() -> None:
    assert [marks.percentile(range(1, 101), share) for share in (0.05, 0.5, 0.95, 1.0)] == [5, 50, 95, 100]
    assert marks.percentile([7], 0.95) == 7


def test_a_package_has_at_most_twelve_modules() -> None:
    assert {package: n for package, n in marks.package_sizes().items() if n > LARGEST_PACKAGE} == {}


def test_class_names_are_unique_and_no_symbol_is_for_tests_alone() -> None:
    assert marks.duplicate_classes() == {}
    assert marks.unused_symbols() == []


def test_state_is_in_no_global_and_one_file_reads_the_environment() -> None:
    assert marks.global_statements() == []
    assert marks.environment_readers() == ["runtime/processes/environment.py"]


# --- the package table ------------------------------------------------------------------------------------------------


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
