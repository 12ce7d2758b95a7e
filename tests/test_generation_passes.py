"""Ways through a network that generation may take: lean walks, scores in parts, CUDA graphs, caches that grow."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.attention.kv_cache import CacheShape, KVCache
from realgraph.runtime.attention.passes import DecodePass, Head, PrefillPass
from realgraph.runtime.cpu.decode import LeanDecoder, lean_applies
from realgraph.runtime.engine import Completion, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.building import Start, build
from tests import tiny
from tests.rollouts import ARCHITECTURES, assert_exact, model, requests, run, served

LOGITS = LeanDecoder.logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "gemma2"])
def test_scores_a_few_at_a_time_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where heads are wider than kernels know, and all share the keys; prompts come in parts."""
    module, limits = served(model(name)), RolloutLimits(max_running=5, prefill_tokens=16)
    wanted = requests(random.Random(5), 10, longest=60, groups_of=2)
    expected = run(ContinuousBatch(module, limits), wanted)
    monkeypatch.setattr("realgraph.runtime.attention.passes.KERNEL_DIM", 4)
    monkeypatch.setattr("realgraph.runtime.attention.passes.MOST_SCORES", 100)
    found = run(ContinuousBatch(module, limits), wanted)
    for request in wanted:
        assert found[request.id].tokens == expected[request.id].tokens
        assert found[request.id].logprobs == pytest.approx(expected[request.id].logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_slots_of_equal_tokens_are_one_row_of_the_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that go the same way for a while, over preemption and updates: their probabilities are their own."""
    module = model(name)
    rows: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        rows.append(len(arguments[1]))
        return LOGITS(*arguments)

    monkeypatch.setattr(LeanDecoder, "logits", counted)
    for limits in (
        RolloutLimits(max_running=24),
        RolloutLimits(max_running=10, max_cache_tokens=256, prefill_tokens=16),
    ):
        engine = ContinuousBatch(module, limits)
        wanted = [replace(r, temperature=0.25 * (r.id % 2)) for r in requests(random.Random(3), 24, 30, groups_of=6)]
        engine.submit(wanted)
        done: dict[int, Completion] = {}
        for step in range(300):
            done |= {c.id: c for c in engine.step()}
            if step % 7 == 6:
                engine.weights_changed(engine.version + 1)
        assert len(done) == len(wanted)
        for request in wanted:
            if request.temperature:
                assert_exact(module, request, done[request.id])
            else:
                expected = next(done[r.id] for r in wanted if r.prompt == request.prompt and not r.temperature)
                n = min(len(expected.tokens), len(done[request.id].tokens))
                assert done[request.id].tokens[:n] == expected.tokens[:n]
    if name != "gemma2":
        n_tokens = 2 * sum(len(completion.tokens) for completion in done.values())
        assert sum(rows) < 0.8 * n_tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_lean_walk_is_taken_where_it_is_known_and_changes_no_token(name: str) -> None:
    module, wanted = served(model(name)), requests(random.Random(4), 6, longest=12, groups_of=2)
    assert lean_applies(module) == (name not in tiny.MIXTURES and "gemma" not in name)
    done = run(ContinuousBatch(module, RolloutLimits(max_running=3)), wanted)
    handle = module.model.layers[1].mlp.register_forward_hook(lambda *_: None)  # a hook must see its calls
    assert not lean_applies(module)
    engine = ContinuousBatch(module, RolloutLimits(max_running=3))
    by_forward = run(engine, wanted)
    handle.remove()
    for request in wanted:
        assert done[request.id].tokens == by_forward[request.id].tokens
        assert done[request.id].logprobs == pytest.approx(by_forward[request.id].logprobs, abs=1e-5)
    assert not lean_applies(module.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cuda_graphs_change_nothing(tmp_path: Path, name: str) -> None:
    reference = model(name)
    reference.save_pretrained(tmp_path)
    module = build(ModelRole(), str(tmp_path), Start(torch.device("cuda"))).network  # as engines build it
    wanted = requests(random.Random(8), 20, groups_of=4)
    plain = run(ContinuousBatch(module, RolloutLimits(max_running=6, cuda_graphs=False)), wanted)
    engine = ContinuousBatch(module, RolloutLimits(max_running=6))
    engine.submit(wanted)
    done: dict[int, Completion] = {}
    while not engine.idle:
        done |= {c.id: c for c in engine.step()}
        engine.weights_changed(0)  # caches recomputed in place under the captured addresses
    for request in wanted:
        assert_exact(reference, request, done[request.id], 1e-3)
        assert_exact(reference, request, plain[request.id], 1e-3)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_pass_goes_on_where_the_cache_has_grown_between_two_of_its_layers(fresh: bool) -> None:
    """Both kinds of pass, over three sequences; the longest has two pages."""
    torch.manual_seed(0)
    shape = CacheShape(2, 2, 4, torch.float64, torch.device("cpu"))
    pages, head = [[1, 2], [3], [4]], Head(0.5, None, None)
    starts, counts = [0 if fresh else 10] * 3, [20, 3, 5]

    def drawn(n: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (torch.randn(3, heads, n, 4, dtype=torch.float64) for heads in (4, 2, 2))
        return q, k, v

    qkv, one = drawn(20), drawn(1)
    found: list[list[Tensor]] = []
    for grown in (False, True):
        cache = KVCache(shape)
        cache.reserve(6)
        prefill = PrefillPass(cache, pages, starts, counts)
        ends = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
        decode = DecodePass(cache, torch.tensor([[1, 2], [3, 0], [4, 0]]), ends, [(0, 3, int(ends.max()) + 1)])
        out: list[Tensor] = []
        for layer in range(2):
            out += [prefill.attend(layer, qkv, head), decode.attend(layer, one, head)]
            if grown:
                cache.reserve(40)
        found.append(out)
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=0)
