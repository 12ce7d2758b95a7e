"""Kept caches where several workers generate together: the samples of one model that went on over its old keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import CacheUse, Completion, OwnWeights, Request, RolloutLimits
from realgraph.runtime.generate.opening import open_rollout
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.groups import LayoutRanks
from tests import tiny
from tests.ranks import RankProcesses, joined
from tests.rollouts import full_logprobs, kept_logprobs
from tests.waiting import until

CPU, MESH = torch.device("cpu"), DeviceMesh(0, 4)
LAYOUTS = {
    "tp4": Layout(MESH, tp=4),
    "dp2_tp2": Layout(MESH, dp=2, tp=2),
    "tp2_pp2": Layout(MESH, tp=2, pp=2),
    "pp4": Layout(MESH, pp=4),
    "ep4": Layout(MESH, dp=4, ep=4),
}
PROMPTS = [(5, 9, 2), (5, 9, 2), (7, 1, 30, 4), (11,) * 20]
WANTED = [Request(i, prompt, 40, seed=i) for i, prompt in enumerate(PROMPTS)]
LATER = Request(9, PROMPTS[-1], 12, seed=9)


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    processes = RankProcesses(4, [*LAYOUTS.values()])
    yield processes
    processes.close()


def switch_together(
    ranks: LayoutRanks, folders: tuple[Path, Path], layout: Layout, cache: CacheUse, beside: bool
) -> list[Completion]:
    """On heads: the samples of an engine that switches while they run, and of one that begins after. beside: it is not
    paused for it."""
    role, groups = ModelRole(path="x", dtype="float32"), joined[0].of_layout(layout)
    limits = RolloutLimits(max_running=8, prefill_tokens=64)
    engine = open_rollout(
        role, OwnWeights(str(folders[0]), CPU, beside=beside), limits, lambda tokens: "", lambda: None, groups
    )
    done: list[Completion] = []
    if groups.heads:
        engine.submit(WANTED)
        assert until(lambda: any(len(sequence.versions) > 7 for sequence in engine._batch._running))
        if not beside:
            engine.pause()
        (folders[0] / f"paused-{ranks.mesh.rank}").touch()
    else:  # no message to the others beside those of generation
        assert until(lambda: len(list(folders[0].glob("paused-*"))) == layout.dp)
        if not beside:
            engine.pause()
    engine.prepare(whole(build(role, str(folders[1]), Start(CPU)).network.named_parameters()))
    engine.switch(1, cache)
    if groups.heads:
        engine.submit([LATER])
        engine.resume()
        while len(done) < len(WANTED) + 1:
            done += engine.take(30.0)
        engine.pause()
        engine.dismiss()
    else:
        engine.follow()
    ranks.mesh.barrier()
    assert engine.close(10.0)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_go_on_over_the_keys_that_the_switch_leaves_them(
    four: RankProcesses, tmp_path: Path, layout: str, cache: CacheUse
) -> None:
    beside = cache == "recompute"
    kind = "qwen3_moe" if layout == "ep4" else "qwen3"
    shape: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "eos_token_id": None}
    models = [tiny.network(kind, seed, **shape) for seed in (1, 2)]
    folders = tmp_path / "old", tmp_path / "new"
    for module, folder in zip(models, folders, strict=True):
        module.save_pretrained(folder)
    found = [done for done in four.run(switch_together, folders, LAYOUTS[layout], cache, beside) if done]
    assert len(found) == LAYOUTS[layout].dp
    for samples in found:
        assert any(set(one.versions) == {0, 1} for one in samples)
        by_id = {one.id: one for one in samples}
        assert set(by_id[9].versions) == {1}
        for request in [*WANTED, LATER]:
            one = by_id[request.id]
            if cache == "keep":
                expected = kept_logprobs(models, request, one)
            else:
                by_version = torch.stack([full_logprobs(module, request, one.tokens) for module in models])
                expected = by_version[torch.tensor(one.versions), torch.arange(len(one.tokens))]
            assert (torch.tensor(one.logprobs) - expected).abs().max() < 1e-4
