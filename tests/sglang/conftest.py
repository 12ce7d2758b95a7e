"""Servers that the tests share: a start costs 20 CPU seconds. At the end, what all has taken."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realgraph.runtime.rollout.server import ServerProcess
from tests.sglang import servers
from tests.sglang.durations import build_seconds, durations
from tests.sglang_conformance.subject import Subject
from tests.sglang_server import wait_ready

BEGAN = pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """No test fails for its time: machines differ, and this one may be busy."""
    if (began := config.stash.get(BEGAN, None)) is None:
        return
    built = build_seconds(servers.PYTHON.parent.parent / "ready")
    for line, late in durations(built, time.monotonic() - began):
        terminalreporter.write_line(line, yellow=late)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    return servers.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def process(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one rank, ready."""
    with servers.started(servers.spec(folders[0], tmp_path_factory.mktemp("server") / "server.log")) as process:
        wait_ready(process)
        yield process


@pytest.fixture
def subject(process: ServerProcess, folders: tuple[Path, Path]) -> Subject:
    """That server, to be checked."""
    return Subject(process.url, process.key, folders)
