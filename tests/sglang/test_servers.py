"""Real servers as processes, and what only these can show: tensor parallelism, a crash, keys, many updates."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from realgraph.runtime.rollout.answers import Answer
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import ServerNotStarted, ServerUnreachable
from realgraph.runtime.rollout.messages import GenerateRequest
from realgraph.runtime.rollout.server import ServerProcess
from tests.sglang import servers
from tests.sglang_conformance import aborts, generation, pauses, weights
from tests.sglang_conformance.subject import (
    LONG,
    OTHER,
    PROMPT,
    SHORTER,
    SMALL,
    TIMEOUTS,
    Check,
    Subject,
    assert_logprobs,
    request,
    run,
)
from tests.sglang_server import wait_ready
from tests.test_sglang_process import alive, family, shared_names
from tests.waiting import until

N_UPDATES = 200
LOAD = 4  # requests at any time


# --- two ranks, whose streams have new tokens alone -------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A server of two ranks."""
    log = tmp_path_factory.mktemp("pair") / "server.log"
    with servers.started(servers.spec(folders[0], log, tp=2, incremental_streaming_output=True)) as process:
        wait_ready(process)
        yield Subject(process.url, process.key, folders, tp=2)


PAIR_CHECKS = (
    generation.logprobs_are_of_the_distribution_at_the_temperature,
    generation.a_stream_is_the_answer_in_parts,
    generation.a_full_queue_is_said_and_can_be_tried_again,
    aborts.an_abort_gives_all_that_was_generated,
    aborts.a_waiting_request_that_is_aborted_keeps_its_tokens_and_lacks_counts,
    pauses.a_retracted_request_goes_on_under_the_new_weights,
    weights.checksums_tell_weights_apart,
    weights.broadcast_weights_are_those_from_disk,
)


@pytest.mark.parametrize("check", PAIR_CHECKS, ids=lambda check: check.__name__)
def test_two_ranks_are_as_one(check: Check, pair: Subject) -> None:
    run(check, pair)


# --- load -------------------------------------------------------------------------------------------------------------


def test_many_updates_under_load_lose_no_token_and_no_version(subject: Subject) -> None:
    """Every span of every answer has the log-probabilities of the weights that its version stands for."""

    async def check(subject: Subject) -> None:
        ended, answers = asyncio.Event(), []
        networks = {subject.client.version: SMALL}

        async def load() -> None:
            while not ended.is_set():
                answers.append(await subject.client.generate(request(SHORTER)))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(LOAD):
                tasks.create_task(load())
            for number in range(N_UPDATES):
                version = next(subject.versions)
                folder, networks[version] = (
                    (subject.folders[1], OTHER) if number % 2 == 0 else (subject.folders[0], SMALL)
                )
                await subject.client.pause("retract")
                await subject.client.update_from_disk(str(folder), version)
                await subject.client.resume()
            ended.set()
        assert len(answers) >= LOAD and all(len(answer.tokens) == SHORTER for answer in answers)
        assert sum(len(answer.spans) - 1 for answer in answers) >= N_UPDATES / 2
        for answer in answers:
            assert_logprobs(answer, PROMPT, 1.0, [networks[span.version] for span in answer.spans])

    run(check, subject)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_command_line_and_no_log(process: ServerProcess) -> None:
    for pid in family(process.pid):
        assert process.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    log = Path(process.spec.log).read_text()
    assert "'api_key': '[key]'" in log and process.key not in log


def test_a_model_that_is_not_there_is_said_with_the_end_of_the_log(tmp_path: Path) -> None:
    wrong = servers.spec(tmp_path / "nothing", tmp_path / "log")
    with servers.started(wrong) as process, pytest.raises(ServerNotStarted, match="ended with status") as caught:
        wait_ready(process)
    assert str(tmp_path / "nothing") in str(caught.value)


def test_a_crash_is_seen_and_another_server_goes_on(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A token outside the vocabulary kills a server on a CPU; its scheduler's death is that of all its processes."""

    async def generate(process: ServerProcess, *requests: GenerateRequest) -> list[object]:
        client = SglangClient(process.url, process.key, TIMEOUTS)
        try:
            await client.open(3)
            return await asyncio.gather(*map(client.generate, requests), return_exceptions=True)
        finally:
            await client.close()

    with servers.started(servers.spec(folders[0], tmp_path / "log")) as process:
        wait_ready(process)
        below, shared = family(process.pid), shared_names(process)
        assert any(name.startswith("sglang_") for name in shared)
        lost = asyncio.run(generate(process, request(LONG), request(1, prompt=(5, 10**6))))
        assert all(isinstance(error, ServerUnreachable) for error in lost), lost
        assert until(lambda: process.status is not None, 60) and process.status != 0
        assert alive(below) == set() and not shared & set(os.listdir("/dev/shm"))
    with servers.started(servers.spec(folders[0], tmp_path / "log")) as process:
        wait_ready(process)
        (answer,) = asyncio.run(generate(process, request(20)))
        assert isinstance(answer, Answer)
        assert_logprobs(answer, PROMPT, 1.0, [SMALL])
        below = family(process.pid)
        os.kill(process.pid, signal.SIGKILL)  # the guardian: the kernel ends the rest
        assert until(lambda: not alive(below), 60)
