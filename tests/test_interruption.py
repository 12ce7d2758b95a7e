"""Samples under way when new weights come: they recompute their caches, keep them, or end first."""

import random
from typing import Any

import pytest
import torch

from realgraph.runtime.commands.actions import Checkpointed, CheckpointWritten, StopRequested
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.weights import whole
from realgraph.runtime.wire.protocol import Reallocate
from tests.resumed_runs import resumed_from
from tests.rollouts import kept_logprobs, model, requests, run
from tests.shapes import random_shape


class PrefillCount:
    """Tokens that a batch prefills."""

    def __init__(self, batch: ContinuousBatch) -> None:
        self.tokens, self._prefill = 0, batch._model.prefill
        batch._model.prefill = self._counted  # type: ignore[method-assign]

    def _counted(self, pages: Any, starts: Any, rows: Any, around: Any) -> Any:
        self.tokens += sum(map(len, rows))
        return self._prefill(pages, starts, rows, around)


# --- keep -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("seed", range(3))
def test_kept_caches_go_on_under_new_weights_and_are_never_computed_again(name: str, seed: int) -> None:
    """Tokens before the first switch are those of an engine that never switches; later ones are of the new weights over
    the old keys; samples that begin later share no page with older ones of their prompt."""
    rng, module, versions = random.Random(seed), model(name), [model(name, number) for number in range(3)]
    wanted = requests(rng, 12, longest=45, groups_of=4)
    unswitched = run(ContinuousBatch(versions[0], RolloutLimits(max_running=6)), wanted)
    batch = ContinuousBatch(module, RolloutLimits(max_running=6, prefill_tokens=rng.choice([16, 64])))
    count = PrefillCount(batch)
    batch.submit(wanted)
    done: dict[int, Completion] = {}
    switches = {rng.randint(3, 8): 1, rng.randint(9, 14): 2}
    for step in range(1000):
        if step in switches:
            batch.weights.take(whole(versions[switches[step]].named_parameters()))
            before = count.tokens
            batch.weights_changed(switches[step], "keep")
            ended = batch.step()
            done |= {one.id: one for one in ended}
            first = {s.request.id for s in batch._running if len(s.versions) == 1}
            first |= {one.id for one in ended if len(one.versions) == 1}
            assert count.tokens - before <= sum(len(request.prompt) for request in wanted if request.id in first)
        done |= {one.id: one for one in batch.step()}
        if batch.idle:
            break
    assert {version for one in done.values() for version in one.versions} == {0, 1, 2}
    assert any(len(set(one.versions)) > 1 for one in done.values())
    assert any(one.versions[0] > 0 for one in done.values())
    for request in wanted:
        one, old = done[request.id], done[request.id].versions.count(0)
        assert list(one.versions) == sorted(one.versions)
        assert one.tokens[:old] == unswitched[request.id].tokens[:old]
        assert one.logprobs[:old] == pytest.approx(unswitched[request.id].logprobs[:old], abs=1e-5)
        expected = kept_logprobs(versions, request, one)
        assert (torch.tensor(one.logprobs) - expected).abs().max() < 1e-4
    recomputed = ContinuousBatch(model(name), RolloutLimits(max_running=6))
    again = PrefillCount(recomputed)
    recomputed.submit(wanted)
    for step in range(1000):
        if step in switches:
            recomputed.weights_changed(switches[step])
        recomputed.step()
        if recomputed.idle:
            break
    assert again.tokens > count.tokens


def test_samples_of_one_prompt_share_pages_only_within_a_version() -> None:
    module, new = model("qwen3"), model("qwen3", 1)
    batch, prompt = ContinuousBatch(module), tuple(range(1, 61))
    batch.submit([Request(i, prompt, 20, seed=i) for i in range(2)])
    batch.step()
    held = batch._pool.n_used
    batch.weights.take(whole(new.named_parameters()))
    batch.weights_changed(1, "keep")
    batch.submit([Request(i, prompt, 20, seed=i) for i in range(2, 4)])
    count = PrefillCount(batch)
    batch.step()
    assert len(prompt) - 1 <= count.tokens <= len(prompt)  # once, for both
    by_id = {sequence.request.id: set(sequence.pages) for sequence in batch._running}
    assert by_id[0] & by_id[1] and by_id[2] & by_id[3]
    assert not (by_id[0] | by_id[1]) & (by_id[2] | by_id[3])
    assert batch._pool.n_used == 2 * held


def test_a_kept_cache_that_was_lost_is_computed_again_as_a_whole() -> None:
    """Memory that others need takes the old keys with it: the sample goes on over those of the new weights alone."""
    module, new = model("qwen3"), model("qwen3", 1)
    batch, request = ContinuousBatch(module), Request(1, (5, 9, 2), 30, seed=1)
    batch.submit([request])
    for _ in range(10):
        batch.step()
    batch.weights.take(whole(new.named_parameters()))
    batch.weights_changed(1, "keep")
    batch.release()
    done: list[Completion] = []
    while not batch.idle:
        done += batch.step()
    old = done[0].versions.count(0)
    expected = kept_logprobs([new, new], request, done[0])
    assert 0 < old < 30
    assert (torch.tensor(done[0].logprobs) - expected)[old:].abs().max() < 1e-4


# --- wait -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_new_weights_that_wait_find_no_sample_under_way_and_every_run_ends(first: int) -> None:
    """Under any plan, whether weights are copied or trained in place, killed and resumed, stopped or not. The
    simulator refuses weights that change while a sample is made."""
    n_ahead = n_moved = 0
    for seed in range(first, first + 40):
        rng = random.Random(seed)
        shape = random_shape(rng)
        shape.interrupt, shape.staleness, shape.steps = "wait", rng.choice([1, 2, 3]), 5
        shape.checkpoint_every = 1
        state: Checkpointed | None = None
        for life in range(3):
            simulator = resumed_from(state, shape, rng)
            halt = simulator.run(max_events=rng.randint(20, 200))
            if life == 2 and halt is None:
                if rng.random() < 0.5:
                    simulator.feed(StopRequested())
                halt = simulator.run()
            n_ahead += any(worker.making for worker in simulator.workers.values())
            n_moved += any(isinstance(sent.command, Reallocate) for sent in simulator.log)
            if halt is not None:
                assert halt.error is None, (seed, shape, halt.reason)
                break
            written = [action.state for action in simulator.actions if isinstance(action, CheckpointWritten)]
            state = written[-1] if written else state
        else:
            raise AssertionError(f"seed {seed} never came to its end")
    assert n_ahead and n_moved
