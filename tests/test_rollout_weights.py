"""Weights that come beside those in use: no token waits for them, and none is drawn from a mixture."""

import threading
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from realgraph.graphs.errors import Where
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.options.footprints import copy_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.request.request import at_staleness
from realgraph.runtime.engine import Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.generate.engine import TorchRolloutEngine
from realgraph.runtime.models.rollout_weights import RolloutWeights
from realgraph.runtime.models.weights import whole
from tests.planner_cases import cluster, grpo, request
from tests.rollouts import full_logprobs, model
from tests.waiting import until

SECONDS = 60.0


def test_generation_goes_on_while_weights_come_beside() -> None:
    """Their owner stops in the middle for as long as the sample takes to end."""
    module, other, ended = model("qwen3", 1), model("qwen3", 2), threading.Event()

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for i, pair in enumerate(other.named_parameters()):
            if i == 3:
                assert ended.wait(SECONDS)
            yield pair

    engine = TorchRolloutEngine(ContinuousBatch(module))
    engine._batch.weights.beside = True
    first, second = (Request(i, (5, 9, 2), 60, seed=i) for i in (1, 2))
    coming = threading.Thread(target=lambda: engine.prepare(whole(slowly())))
    coming.start()
    engine.submit([first])
    (done,) = engine.take(SECONDS)
    assert set(done.versions) == {0}
    assert (torch.tensor(done.logprobs) - full_logprobs(model("qwen3", 1), first, done.tokens)).abs().max() < 1e-4
    ended.set()
    coming.join(SECONDS)
    engine.switch(1)
    engine.submit([second])
    (done,) = engine.take(SECONDS)
    assert (torch.tensor(done.logprobs) - full_logprobs(other, second, done.tokens)).abs().max() < 1e-4
    assert set(done.versions) == {1}
    assert engine.close(SECONDS)


def test_weights_beside_are_whole_or_not_used_and_take_one_copy_of_memory() -> None:
    module = model("qwen3", 1)
    weights, old = RolloutWeights(module), model("qwen3", 1)
    weights.beside = True
    addresses = set[int]()
    for seed in range(2, 7):
        new = model("qwen3", seed)
        broken = list(new.named_parameters())[:-1]
        with pytest.raises(ValueError, match="missing"):
            weights.take(whole(iter(broken)))
        weights.switch()
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), old.parameters(), strict=True))
        weights.take(whole(new.named_parameters()))
        weights.switch()
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), new.parameters(), strict=True))
        addresses.add(next(module.parameters()).data_ptr())
        old = new
    assert len(addresses) == 2


def test_counted_bytes_of_weights_beside_are_the_planners() -> None:
    """Twice those of the weights, once new ones have come."""
    module = model("qwen3", 1)
    weights = RolloutWeights(module)
    weights.beside = True
    weights.take(whole(model("qwen3", 2).named_parameters()))
    tensors = [*module.parameters(), *(part.values for part in weights._next.values())]
    storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}
    spec = spec_from_config(module.config.to_dict(), Where())
    asked = at_staleness(replace(request(grpo("float32"), machine=cluster("cpu", 2)), models={"actor": spec}), 1)
    held = copy_of(asked, "rollout", Layout(DeviceMesh(0, 1)), asked.cluster)
    assert sum(storages.values()) == pytest.approx(held.total, rel=0.02)


def test_checksums_are_those_of_the_weights_in_use() -> None:
    module, other = model("qwen3", 1), model("qwen3", 2)
    weights, expected = RolloutWeights(module), RolloutWeights(other).checksums()
    weights.beside = True
    before = weights.checksums()
    weights.take(whole(other.named_parameters()))
    assert torch.equal(weights.checksums(), before)
    weights.switch()
    assert torch.equal(weights.checksums(), expected)
    assert (before != expected).all()
    with torch.no_grad():
        next(module.parameters()).view(-1)[7] += 1e-3
    assert (weights.checksums() != expected).tolist() == [True, *[False] * (len(expected) - 1)]


def test_an_engine_tells_its_version_and_the_room_of_its_cache() -> None:
    engine = TorchRolloutEngine(ContinuousBatch(model("qwen3"), RolloutLimits(max_cache_tokens=256)))
    unbounded = TorchRolloutEngine(ContinuousBatch(model("qwen3")))
    assert (engine.status().version, engine.status().free_cache_tokens) == (0, 256)
    assert unbounded.status().free_cache_tokens is None
    engine.switch(4)
    engine.submit([Request(1, (5,) * 40, 80, seed=1)])
    assert until(lambda: engine.status().free_cache_tokens not in (None, 256))
    assert engine.status().version == 4
    engine.take(SECONDS)
    assert engine.status().free_cache_tokens == 256
    assert engine.close(SECONDS)
    assert unbounded.close(SECONDS)
