"""The engine over a real server: its samples are exact through a weight update and a server's death."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.models.weights import whole
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.rollout.messages import RankChecksums
from realgraph.runtime.rollout.opening.engines import EngineOrder, open_sglang
from realgraph.runtime.rollout.opening.homes import OwnServer
from realgraph.runtime.rollout.weights.agreement import UpdateWords
from realgraph.runtime.rollout.weights.broadcast import DONE, STAGED, Broadcast, Broadcaster, Servers, buckets_of
from realgraph.runtime.rollout.weights.staged import StagedWeights
from tests.rollouts import full_logprobs
from tests.sglang.servers import OF_RUNS, START_SECONDS, interpreter
from tests.sglang_conformance.subject import CONTEXT, OTHER, SMALL
from tests.waiting import until

NETWORKS = (SMALL, OTHER)
N_NEW = 800
N_UPDATES = 200
LOAD = 4  # requests at any time
LOAD_NEW = 100  # tokens of each
SERVERS = Servers((0,), 2)  # of broadcasts: one, of two ranks


def server_of(engine: SglangEngine) -> int:
    assert isinstance(engine._home, OwnServer) and engine._home.process is not None
    return engine._home.process.pid


def grown(engine: SglangEngine, tokens: int) -> bool:
    return all(len(one.tokens) + len(one.seen) >= tokens for one in list(engine._requests.running.values()))


def opened(folder: Path, home: Path, tp: int = 1) -> SglangEngine:
    """An engine with a server of its own."""
    order = EngineOrder(
        role=ModelRole(dtype="float32"),
        path=str(folder),
        rollout=RolloutSpec(engine="sglang", python=str(interpreter(home)), server_args=OF_RUNS),
        limits=RolloutLimits(max_running=8),
        decode=lambda tokens: "",
        device=torch.device("cpu"),
        folder=home,
        call="rollout",
        replica=0,
        worker=0,
        context=CONTEXT,
        start_seconds=START_SECONDS,
        silent_seconds=120.0,
        deadline_seconds=1200.0,
        tp=tp,
    )
    return open_sglang(order, lambda: None)


def prepared(engine: SglangEngine, network: Any) -> None:
    engine.prepare(whole((name, values) for name, values in network.named_parameters()))


def taken(engine: SglangEngine, n: int) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    deadline = time.monotonic() + START_SECONDS
    while len(done) < n and time.monotonic() < deadline:
        done |= {one.id: one for one in engine.take(1.0)}
    return done


def assert_exact(request: Request, made: Completion, networks: Mapping[int, Any]) -> None:
    """Every token has the log-probability of the network of its version, and versions only grow."""
    given = {id(network): full_logprobs(network, request, made.tokens) for network in networks.values()}
    expected = torch.stack([given[id(networks[version])][at] for at, version in enumerate(made.versions)])
    assert len(made.tokens) == request.max_new_tokens and list(made.versions) == sorted(made.versions)
    assert (torch.tensor(made.logprobs) - expected).abs().mean() < 1e-4


def test_samples_are_exact_through_an_update_and_a_death(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine, networks = opened(folders[0], tmp_path), {0: SMALL, 1: OTHER, 2: SMALL}
    wanted = [Request(i, (5, 9, 2 + i), N_NEW, seed=i) for i in range(4)]
    engine.submit(wanted)
    assert until(lambda: grown(engine, 20), 120.0)
    for version in (1, 2):
        prepared(engine, networks[version])
        engine.switch(version)
        if version == 1:
            os.killpg(server_of(engine), signal.SIGKILL)
    done = taken(engine, len(wanted))
    assert engine.close(60.0)
    for request in wanted:
        assert_exact(request, done[request.id], networks)
        assert {0, 2} <= set(done[request.id].versions)


# --- broadcasts -------------------------------------------------------------------------------------------------------


class Trainer(Broadcaster):
    """Sends; and once, kills the server that waits for the first bucket."""

    victim = 0

    def _broadcast(self, update: int, flat: torch.Tensor) -> None:
        if self.victim:
            os.killpg(self.victim, signal.SIGKILL)
        super()._broadcast(update, flat)


@dataclass
class Pair:
    """An engine over a server of two ranks, and the trainer that broadcasts to it. networks: by version."""

    engine: SglangEngine
    words: UpdateWords
    trainer: Trainer
    staged: StagedWeights
    networks: dict[int, Any] = field(default_factory=lambda: {0: SMALL})
    n_broadcasts: int = 0

    def broadcast(self, network: Any) -> None:
        """New weights, by the way of a run."""
        self.n_broadcasts += 1
        words, version, update = self.words, self.engine.version + 1, self.n_broadcasts
        self.networks[version] = network
        specs = self.engine.weight_specs()
        self.staged.keep_newest()
        folder = self.staged.gather(whole((name, values) for name, values in network.named_parameters()))
        sending = threading.Thread(target=self.trainer.send, args=(update, folder, specs))
        sending.start()
        assert words.hear(update, STAGED) == str(folder)
        taken = Broadcast(words, update, SERVERS, 0, "gloo", buckets_of(specs))
        self.engine.receive(folder, version, taken)
        words.post(update, f"{DONE}0")
        sending.join(60.0)
        assert not sending.is_alive() and self.engine.version == version

    @property
    def failure(self) -> str | None:
        """The newest broadcast's."""
        return self.words.failure(self.n_broadcasts)

    def by_disk(self, network: Any) -> None:
        """New weights, without a broadcast."""
        version = self.engine.version + 1
        self.networks[version] = network
        prepared(self.engine, network)
        self.engine.switch(version)

    @property
    def checksums(self) -> Sequence[RankChecksums]:
        """The server's."""
        return self.engine._call(self.engine._serving.client.checksums())


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    engine = opened(folders[0], home, tp=2)
    words = UpdateWords(HashStore(), "rollout", START_SECONDS, lambda worker: False)
    trainer = Trainer(words, "rollout", SERVERS, torch.device("cpu"))
    yield Pair(engine, words, trainer, StagedWeights(folders[0], engine.weight_specs(), home / "trainer"))
    assert engine.close(60.0)


def test_many_broadcasts_under_load_lose_no_token_and_no_version(pair: Pair) -> None:
    """By one group of ranks, which lasts; afterwards the server has the tensors that it has from disk."""
    wanted: dict[int, Request] = {}
    done: dict[int, Completion] = {}
    for number in range(N_UPDATES):
        missing = LOAD + len(done) - len(wanted)
        new = [Request(i, (5, 9, 2), LOAD_NEW, seed=i) for i in range(len(wanted), len(wanted) + missing)]
        pair.engine.submit(new)
        wanted |= {request.id: request for request in new}
        pair.broadcast(NETWORKS[(number + 1) % 2])
        assert pair.failure is None
        done |= {one.id: one for one in pair.engine.take(0.0)}
    last = pair.checksums
    pair.engine.read_again()
    assert pair.checksums == last
    done |= taken(pair.engine, len(wanted) - len(done))
    pair.by_disk(NETWORKS[N_UPDATES % 2])
    assert pair.checksums == last
    pair.by_disk(NETWORKS[(N_UPDATES + 1) % 2])
    assert pair.checksums != last
    assert done.keys() == wanted.keys() and len(done) >= 2 * LOAD
    for number, request in wanted.items():
        assert_exact(request, done[number], pair.networks)
    versions = [len(set(completion.versions)) for completion in done.values()]
    assert sum(versions) - len(versions) >= N_UPDATES / 2


def test_a_death_in_a_broadcast_hangs_nobody(pair: Pair) -> None:
    """The server is started again with the weights of that broadcast; the next one reaches it."""
    wanted = Request(0, (5, 9, 2), N_NEW, seed=0)
    pair.engine.submit([wanted])
    assert until(lambda: grown(pair.engine, 20), 120.0)
    pair.broadcast(OTHER)
    assert pair.failure is None
    expected = pair.checksums
    pair.trainer.victim = before = server_of(pair.engine)
    pair.broadcast(SMALL)
    assert pair.failure is not None and server_of(pair.engine) != before
    assert_exact(wanted, taken(pair.engine, 1)[0], pair.networks)
    pair.trainer.victim = 0
    pair.broadcast(OTHER)
    assert pair.failure is None
    assert pair.checksums == expected
