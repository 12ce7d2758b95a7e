"""Words about updates by broadcast: a wait for a worker ends when that worker is gone, and the others go on."""

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore

from realgraph.runtime.engine import WeightSpec
from realgraph.runtime.job.engine_loss import expendable_workers, meeting_worker
from realgraph.runtime.rollout.weights.agreement import BroadcastFailed, UpdateWords, WorkerGone
from realgraph.runtime.rollout.weights.broadcast import DONE, GROUP, READY, STAGED, Broadcaster, Servers
from tests.shapes import Shape, job_of

PATIENCE = 60.0
SPECS = (WeightSpec("w", (2, 3), torch.float32),)


@pytest.fixture
def gone() -> set[int]:
    return set()


@pytest.fixture
def words(gone: set[int]) -> UpdateWords:
    return UpdateWords(HashStore(), "rollout", PATIENCE, gone.__contains__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_word_of_a_worker_that_is_gone_is_not_awaited(words: UpdateWords, gone: set[int]) -> None:
    words.post(1, "ready/0", "group")
    gone.add(7)
    assert words.hear(1, "ready/0", 7) == "group"  # it was said before
    with pytest.raises(WorkerGone, match="worker 7, which has a server, is gone"):
        words.hear(1, "ready/1", 7)
    words.fail(1, "the server of worker 3 has ended")
    with pytest.raises(BroadcastFailed, match="the server of worker 3 has ended"):
        words.hear(1, "ready/1", 7)


def test_of_workers_that_are_gone_only_what_they_have_said_is_heard(gone: set[int]) -> None:
    """Whoever asks hears the same: also of a worker that says its last word between two looks."""
    store = HashStore()

    def says_a_last_word(worker: int) -> bool:
        if worker == 7:
            UpdateWords(store, "rollout", PATIENCE, gone.__contains__).post(0, "server/7", "2.28")
        return worker == 7 or worker in gone

    words = UpdateWords(store, "rollout", PATIENCE, says_a_last_word)
    words.post(0, "server/3", "2.27")
    asked = {3: "server/3", 5: "server/5", 7: "server/7"}
    threading.Timer(0.2, gone.add, (5,)).start()
    began = time.monotonic()
    assert words.hear_those(0, asked) == ["2.27", "2.28"]
    assert time.monotonic() - began < PATIENCE / 2


def test_a_broadcast_ends_with_the_worker_of_a_server_and_the_others_read_the_folder(
    words: UpdateWords, gone: set[int], folder: Path
) -> None:
    trainer = Broadcaster(words, "rollout", Servers((3, 5), 1), torch.device("cpu"))
    sending = threading.Thread(target=trainer.send, args=(1, folder, SPECS), daemon=True)
    sending.start()
    assert words.hear(1, STAGED) == str(folder)
    words.post(1, f"{READY}0")
    threading.Timer(0.2, gone.add, (5,)).start()
    with pytest.raises(BroadcastFailed, match="worker 5"):
        words.hear(1, GROUP)  # as the worker of the first server does
    sending.join(PATIENCE)
    assert not sending.is_alive()
    threading.Timer(0.2, words.post, (1, f"{DONE}0")).start()
    began = time.monotonic()
    trainer.await_done(1)
    assert 0.1 < time.monotonic() - began < PATIENCE / 2
    assert words.said(1, f"{DONE}0") is not None and words.said(1, f"{DONE}1") is None


@pytest.mark.parametrize("staleness", [0, 1])
def test_workers_meet_in_the_store_of_one_without_which_there_is_no_run(staleness: int) -> None:
    job = job_of(Shape(n_workers=4, split=True, staleness=staleness))
    opener = meeting_worker(job.graph, job.plan, job.cluster.n_devices)
    expendable = expendable_workers(job.graph, job.plan)
    assert bool(expendable) == bool(staleness)
    assert opener not in expendable
    assert set(range(opener)) <= expendable
