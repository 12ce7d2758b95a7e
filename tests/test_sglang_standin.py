"""The stand-in for an SGLang server passes the checks of real ones; besides: older releases, and what ends servers."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from realgraph.runtime.rollout.server import ServerProcess, ServerSpec
from tests import tiny
from tests.sglang.durations import BUILD_SECONDS, TEST_SECONDS, build_seconds, durations
from tests.sglang.servers import ARGUMENTS, save_models, started
from tests.sglang_conformance import textless as without_texts
from tests.sglang_conformance.checks import CHECKS
from tests.sglang_conformance.subject import Check, Subject, run
from tests.sglang_server import ROOT, StandIn, interpreter, standin, wait_ready
from tests.waiting import until


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def process(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The stand-in under SGLang's name, started as a real one is."""
    home = tmp_path_factory.mktemp("environment")
    python = interpreter(home, SGLANG_HEALTH_CHECK_TIMEOUT="3")
    with started(ServerSpec(str(python), str(folders[0]), 0, str(home / "server.log"), ARGUMENTS)) as process:
        wait_ready(process)
        yield process


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, process: ServerProcess, folders: tuple[Path, Path]) -> None:
    run(check, Subject(process.url, process.key, folders))


@pytest.mark.parametrize("check", without_texts.CHECKS, ids=lambda check: check.__name__)
def test_conformance_without_texts(check: Check, folders: tuple[Path, Path], tmp_path: Path) -> None:
    with standin(folders[0], tmp_path, "--skip-tokenizer-init", "--incremental-streaming-output") as server:
        run(check, Subject(server.url, "", folders))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as one:
        yield one


def begun(server: StandIn, pool: ThreadPoolExecutor, rid: str) -> Future[dict[str, Any]]:
    """A long request that the server has."""
    before = server.requests()
    future = pool.submit(server.generate, [5, 9, 2], 1900, rid=rid)
    assert until(lambda: server.requests() > before)
    return future


def test_older_releases_want_no_session_and_end_where_they_can_not_flush(
    folders: tuple[Path, Path], tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with standin(folders[0], tmp_path, release="0.5.18") as old:
        assert old.ask("/begin_weight_update", {"selector": "all"})[0] == 404
        assert old.ask("/ready")[0] == 404
        assert "weight_versions" not in old.generate([5, 9, 2], 3)["meta_info"]
        one = begun(old, pool, "one")
        old.ask("/pause_generation", {"mode": "retract"})
        assert old.ask("/flush_cache", {})[0] == 400
        update = {"model_path": str(folders[1]), "weight_version": "1", "flush_cache": False}
        assert old.ask("/update_weights_from_disk", update)[0] == 200
        crash = pool.submit(old.ask, "/update_weights_from_disk", {**update, "flush_cache": True})
        assert until(lambda: not old.process.is_alive())
        assert one.exception(10) is not None and crash.exception(10) is not None


@pytest.mark.parametrize("how", ["vocabulary", "release"])
def test_what_ends_a_server_ends_this_one(
    folders: tuple[Path, Path], tmp_path: Path, pool: ThreadPoolExecutor, how: str
) -> None:
    """A token outside the vocabulary; memory that is released under a request."""
    with standin(folders[0], tmp_path) as server:
        one = begun(server, pool, "one")
        if how == "vocabulary":
            pool.submit(server.generate, [tiny.VOCABULARY], 3)
        else:
            pool.submit(server.ask, "/release_memory_occupation", {})
        assert until(lambda: not server.process.is_alive())
        assert one.exception(10) is not None


def test_what_the_tests_of_real_servers_take_is_told_and_warned_of(tmp_path: Path) -> None:
    """Beside what their environment took, which make writes where it builds one: here of nothing."""
    python, environment = tmp_path / "python", tmp_path / "venv" / "sglang"
    python.write_text(f"#!/bin/sh\nmkdir {environment}/bin\ncp /bin/true {environment}/bin/python\n")
    python.chmod(0o755)
    make = ["make", "-s", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", str(environment / "ready")]
    subprocess.run(make, cwd=ROOT, check=True)
    build = build_seconds(environment / "ready")
    assert build is not None and 0 <= build < BUILD_SECONDS
    assert [line for line, _ in durations(119, 100)] == [
        "building the environment took 119 s (at most 240)",
        "the tests took 100 s (at most 360)",
    ]
    assert not any(late for _, late in durations(build, 100))
    assert [late for _, late in durations(BUILD_SECONDS + 1, TEST_SECONDS + 1)] == [True, True]
    (environment / "ready").write_text("")  # of an environment that was built before this was known
    assert [late for _, late in durations(build_seconds(environment / "ready"), 100)] == [False]
