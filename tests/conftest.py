"""Settings of all tests: random cases repeat, and thousands of tests in one process are quick."""

import contextlib
import gc
import importlib
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded: the ranks and workers of a test share the cores, and threads that spin would take all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases in each run of `make test`, so that a red one is due to a change; `make fuzz` draws others. Nothing is
# timed: other processes may have the cores.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

gc.disable()  # until all tests are collected: nearly all of the many objects that imports make stay

RANDOM = ("seed", "first", "block", "number")  # parameters that only number random cases
MEASURED = 2


def pytest_collection(session: pytest.Session) -> None:
    """Have every other process of the whole suite import the tests from the last one on: each then finds half of all
    modules compiled by its neighbour. Whatever is wrong with one is told when pytest collects it."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number.isdigit() and int(number) % 2 and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for path in sorted(Path(__file__).parent.glob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(f"tests.{path.stem}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage on the first random cases only: the tracer more than doubles what the others would take.

    Where pytest-cov is not in use, its mark means nothing.
    """
    n_seen: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            fixed = {name: value for name, value in item.callspec.params.items() if name not in RANDOM}
            if len(fixed) == len(item.callspec.params):
                continue
            test = f"{item.nodeid.partition('[')[0]} {fixed}"
            n_seen[test] += 1
            if n_seen[test] > MEASURED:
                item.add_marker("no_cover")


class FailuresAtOnce:
    """Prints each failure when it happens: a run that is ended from outside prints no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0]
            self._terminal.write_line(f"\n{report.nodeid} fails ({report.when}, {report.duration:.0f} s): {message}")


@pytest.hookimpl(trylast=True)  # the terminal is there by then
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(terminal, pytest.TerminalReporter):  # not in a process of xdist's
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_finish() -> None:
    """Every module is imported by now: the garbage collector need not walk over them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
