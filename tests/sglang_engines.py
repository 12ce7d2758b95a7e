"""Engines of tests over SGLang servers that stand in, and what the tests of them share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.job.rollout import RolloutSpec
from realgraph.runtime.models.weights import whole
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.rollout.opening.engines import EngineOrder, open_sglang
from realgraph.runtime.rollout.samples import GrowingSample
from tests import tiny
from tests.rollouts import full_logprobs
from tests.sglang_server import StandIn, standin
from tests.sglang_standin.server import letters

LONG = {"max_position_embeddings": 2048, "eos_token_id": None}
MODELS = [tiny.network("qwen3", seed, **LONG) for seed in range(3)]  # by version
SECONDS = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    MODELS[0].save_pretrained(folder)
    return folder


def opened(
    folder: Path, spec: RolloutSpec, home: Path, notify: Callable[[], None] = lambda: None, **changes: Any
) -> SglangEngine:
    home.mkdir(exist_ok=True)
    order = EngineOrder(
        role=ModelRole(dtype="float32"),
        path=str(folder),
        rollout=spec,
        limits=RolloutLimits(max_running=16),
        decode=letters,
        device=torch.device("cpu"),
        folder=home,
        call="rollout",
        replica=0,
        worker=0,
        context=64,
        start_seconds=SECONDS,
        silent_seconds=SECONDS,
        deadline_seconds=2 * SECONDS,
    )
    return open_sglang(order._replace(**changes), notify)


@contextmanager
def given(folder: Path, home: Path, *, streams: bool = True, **changes: Any) -> Iterator[tuple[StandIn, SglangEngine]]:
    """An engine over a server that is given as a URL."""
    with standin(folder, home, *(["--incremental-streaming-output"] if streams else [])) as server:
        engine = opened(folder, RolloutSpec(engine="sglang", urls=(server.url,)), home / "run", **changes)
        yield server, engine
        engine.close(SECONDS)


def assert_exact(request: Request, done: Completion) -> None:
    """Every token's log-probability is that of the model of its version, and versions only grow."""
    assert list(done.versions) == sorted(done.versions)
    assert len(done.tokens) == len(done.logprobs) == len(done.versions) == request.max_new_tokens
    by_version = [full_logprobs(model, request, done.tokens) for model in MODELS]
    expected = torch.stack([by_version[version][at] for at, version in enumerate(done.versions)])
    assert (torch.tensor(done.logprobs) - expected).abs().max() < 1e-4


def switch(engine: SglangEngine, version: int) -> None:
    engine.prepare(whole((name, values) for name, values in MODELS[version].named_parameters()))
    engine.switch(version)


def samples(engine: SglangEngine) -> dict[int, GrowingSample]:
    """Those that are being generated."""
    return dict(engine._requests.running)


def running(engine: SglangEngine, tokens: int = 5) -> bool:
    """Every request has so many tokens, at least."""
    return all(len(one.tokens) + len(one.seen) >= tokens for one in samples(engine).values())
