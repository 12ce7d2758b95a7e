"""Servers that the tests share: a start costs 20 CPU seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from realgraph.runtime.rollout.server import ServerProcess
from tests.sglang import servers
from tests.sglang_conformance.subject import Subject
from tests.sglang_server import wait_ready


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
