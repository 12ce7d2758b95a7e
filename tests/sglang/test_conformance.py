"""A real server behaves as the client expects: every check of the suite that the stand-in passes too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang import servers
from tests.sglang_conformance import textless as without_texts
from tests.sglang_conformance.checks import CHECKS
from tests.sglang_conformance.subject import Check, Subject, run
from tests.sglang_server import wait_ready


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, subject: Subject) -> None:
    run(check, subject)


@pytest.fixture
def textless(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Subject]:
    """A server without its tokenizer, whose streams have new tokens alone."""
    streaming = {"skip_tokenizer_init": True, "incremental_streaming_output": True}
    with servers.started(servers.spec(folders[0], tmp_path / "server.log", **streaming)) as process:
        wait_ready(process)
        yield Subject(process.url, process.key, folders)


@pytest.mark.parametrize("check", without_texts.CHECKS, ids=lambda check: check.__name__)
def test_conformance_without_texts(check: Check, textless: Subject) -> None:
    run(check, textless)
