"""The generation engine against plain transformers forwards, over schedules that compact, preempt and update."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realgraph.runtime.attention.pages import PAGE_TOKENS
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.weights import whole
from tests import tiny
from tests.rollouts import ARCHITECTURES, assert_exact, full_logprobs, model, requests, run, served


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_behaviour_logprobs_equal_a_full_forward(name: str) -> None:
    module = model(name)
    wanted = [replace(r, temperature=1.0 if r.id % 3 else 0.8) for r in requests(random.Random(7), 14, groups_of=2)]
    done = run(ContinuousBatch(served(module), RolloutLimits(max_running=5, prefill_tokens=16)), wanted)
    for request in wanted:
        assert len(done[request.id].tokens) == request.max_new_tokens
        assert not done[request.id].finished
        assert_exact(module, request, done[request.id])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers_generate(name: str) -> None:
    module = model(name)
    wanted = [replace(r, temperature=0.0) for r in requests(random.Random(3), 6, longest=24)]
    done = run(ContinuousBatch(served(module), RolloutLimits(max_running=3)), wanted)
    for request in wanted:
        ids = torch.tensor([request.prompt])
        expected = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens
        )
        assert list(done[request.id].tokens) == expected[0, len(request.prompt) :].tolist()
        assert set(done[request.id].logprobs) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_sample_depends_on_its_seed_alone(seed: int) -> None:
    """Arrival, slots, cache size, prefill chunks and aborted neighbours change no token."""
    rng, module = random.Random(seed), model("qwen3")
    wanted = requests(rng, 12, groups_of=3)
    expected = run(ContinuousBatch(module, RolloutLimits(max_running=12)), wanted)
    for limits in (
        RolloutLimits(max_running=1),
        RolloutLimits(max_running=5, prefill_tokens=8),
        RolloutLimits(max_running=12, max_cache_tokens=256),
    ):
        shuffled = rng.sample(wanted, len(wanted))
        done = run(ContinuousBatch(module, limits), shuffled)
        assert {i: c.tokens for i, c in done.items()} == {i: c.tokens for i, c in expected.items()}
    engine = ContinuousBatch(module, RolloutLimits(max_running=4))
    noise = [replace(r, id=r.id + 100, seed=r.seed + 1) for r in wanted]
    engine.submit(noise)
    got: dict[int, Completion] = {}
    for _ in range(rng.randint(1, 9)):
        got |= {c.id: c for c in engine.step()}
    engine.abort([r.id for r in noise])
    assert engine.idle
    assert run(engine, wanted).keys() == expected.keys()
    engine.submit(noise[:5])
    engine.step()
    engine.abort([100, 102])
    done = run(engine, wanted)
    assert {i: c.tokens for i, c in done.items() if i < 100} == {i: c.tokens for i, c in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_is_set_aside_goes_on_as_if_nothing_had_been(seed: int) -> None:
    """Also where other requests have the same ids, are left unfinished, or fail."""
    rng, module = random.Random(seed), model("qwen3")
    wanted, others = requests(rng, 9, groups_of=3), requests(rng, 7, groups_of=2)
    expected, alone = (run(ContinuousBatch(module, RolloutLimits(max_running=12)), some) for some in (wanted, others))
    engine = ContinuousBatch(module, RolloutLimits(max_running=4, prefill_tokens=rng.choice([16, 4096])))
    engine.submit(wanted)
    done: dict[int, Completion] = {}

    def fail() -> None:
        with engine.set_aside():
            engine.submit(others)
            engine.step()
            raise RuntimeError

    for _ in range(3):
        for _ in range(rng.randint(0, 8)):
            done |= {completion.id: completion for completion in engine.step()}
        with engine.set_aside():
            assert engine.idle
            found = run(engine, others)
        assert {i: c.tokens for i, c in found.items()} == {i: c.tokens for i, c in alone.items()}
        with pytest.raises(RuntimeError):
            fail()
    assert not engine.idle
    while not engine.idle:
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    assert {i: c.tokens for i, c in done.items()} == {i: c.tokens for i, c in expected.items()}
    for request in wanted:
        assert_exact(module, request, done[request.id])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("shared", [True, False])
def test_after_an_update_each_token_is_of_the_version_that_drew_it(name: str, shared: bool) -> None:
    module, versions = model(name), [model(name, seed) for seed in range(4)]
    engine = ContinuousBatch(module, RolloutLimits(max_running=6, prefill_tokens=32))
    wanted = requests(random.Random(11), 10, longest=45, groups_of=2)
    engine.submit(wanted)
    done: dict[int, Completion] = {}
    version = 0
    for step in range(1000):
        if step % 9 == 8 and version < 3:
            version += 1
            if shared:
                module.load_state_dict(versions[version].state_dict())
                engine.weights_changed(version)
            else:
                engine.weights.take(whole(versions[version].named_parameters()))
                engine.weights_changed(version)
        done |= {c.id: c for c in engine.step()}
        if engine.idle:
            break
    assert {v for c in done.values() for v in c.versions} == {0, 1, 2, 3}
    for request in wanted:
        completion = done[request.id]
        assert list(completion.versions) == sorted(completion.versions)
        by_version = torch.stack([full_logprobs(m, request, completion.tokens) for m in versions])
        expected = by_version[torch.tensor(completion.versions), torch.arange(len(completion.tokens))]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4


SMALL = model("qwen3", 5)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["submit", "step", "step", "step", "abort", "update", "release"]), st.integers(0, 7)),
    max_size=60,
)
LIMITS = st.builds(
    RolloutLimits,
    st.integers(1, 6),
    max_cache_tokens=st.sampled_from([None, 128, 200]),
    prefill_tokens=st.sampled_from([4, 64]),
)


@pytest.mark.slow
@settings(max_examples=20)
@given(ACTIONS, LIMITS, st.integers(0, 5), st.integers(1, 4))
def test_random_schedules_lose_and_repeat_nothing(
    actions: list[tuple[str, int]], limits: RolloutLimits, seed: int, groups_of: int
) -> None:
    """Submits, aborts, updates, releases and steps in any order: each request ends once, or was aborted."""
    engine = ContinuousBatch(SMALL, limits)
    waiting = requests(random.Random(seed), 16, longest=20, groups_of=groups_of)
    by_id = {r.id: r for r in waiting}
    live: list[int] = []
    aborted: set[int] = set()
    done: dict[int, Completion] = {}
    for action, number in [*actions, ("submit", 16), *[("step", 0)] * 1000]:
        match action:
            case "submit":
                engine.submit(waiting[:number])
                live += [r.id for r in waiting[:number]]
                waiting = waiting[number:]
            case "abort":
                gone = live[number : number + 2]
                engine.abort([*gone, 999])
                live = [i for i in live if i not in gone]
                aborted |= set(gone)
            case "update":
                engine.weights_changed(engine.version + 1)
            case "release":
                engine.release()
                assert engine.cache_bytes == 0
            case _:
                for completion in engine.step():
                    live.remove(completion.id)
                    done[completion.id] = completion
        assert engine.idle == (not live)
        if engine.idle and not waiting:
            break
    assert set(done) | aborted == set(by_id)
    assert set(done).isdisjoint(aborted)
    for i in sorted(done)[:3]:
        assert len(done[i].tokens) == len(done[i].logprobs) == len(done[i].versions) == by_id[i].max_new_tokens
        assert_exact(SMALL, by_id[i], done[i])


def test_a_stop_token_ends_a_sample_and_belongs_to_it() -> None:
    wanted = [replace(r, stop_tokens=frozenset(range(20))) for r in requests(random.Random(1), 20)]
    for completion in run(ContinuousBatch(SMALL, RolloutLimits(max_running=4)), wanted).values():
        new = completion.tokens
        assert all(token >= 20 for token in new[:-1])
        assert completion.finished == (new[-1] < 20)
        assert completion.finished or len(new) == wanted[completion.id].max_new_tokens


def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it() -> None:
    def text(tokens: Sequence[int]) -> str:
        return "".join("ab!"[token % 3] for token in tokens)

    wanted = [replace(r, stop_strings=("a!b", "bbb")) for r in requests(random.Random(2), 20)]
    for completion in run(ContinuousBatch(SMALL, RolloutLimits(max_running=4), decode=text), wanted).values():
        said = text(completion.tokens)
        assert completion.finished == said.endswith(("a!b", "bbb"))
        assert not any(stop in said[:-1] for stop in ("a!b", "bbb"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, tiny.VOCABULARY)}, "outside the model's vocabulary"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 126}, "3 prompt + 126 new tokens exceed 128"),
        ({"max_new_tokens": 70}, "can't fit a cache of 64"),
        ({"top_p": 0.0}, "out of range"),
        ({"stop_strings": ("x",)}, "decode"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    engine = ContinuousBatch(SMALL, RolloutLimits(max_cache_tokens=64))
    good = Request(4, (1, 2, 3), 5, seed=0)
    with pytest.raises(ValueError, match=says.replace("+", r"\+")) as raised:
        engine.submit([good, replace(good, id=5, **change)])
    assert "request 5" in str(raised.value)
    assert engine.idle
    engine.submit([good])
    with pytest.raises(ValueError, match="in use already: 4"):
        engine.submit([good])


def test_an_update_refuses_foreign_missing_and_misshapen_weights() -> None:
    module = model("llama")
    engine = ContinuousBatch(module)
    own = dict(module.named_parameters())
    assert [spec.name for spec in engine.weights.specs()] == list(own)
    with pytest.raises(ValueError, match=r"'nothing\.weight' is unknown"):
        engine.weights.take(whole(iter({"nothing.weight": torch.zeros(1)}.items())))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is \(33,\) at \(0,\), not in \(32,\)"):
        engine.weights.take(whole(iter({"model.norm.weight": torch.zeros(33)}.items())))
    with pytest.raises(ValueError, match=r"missing, or came twice: \['model\.norm\.weight'\]"):
        engine.weights.take(whole((k, v[:3] if k == "model.norm.weight" else v) for k, v in own.items()))
    assert engine.version == 0


def test_a_shared_module_is_left_as_it_was_and_can_train() -> None:
    module = model("qwen3").train()
    module.model.layers[1].eval()
    attention = module.config._attn_implementation
    flags = [m.training for m in module.modules()]
    names = sorted(dict(module.named_buffers()))
    engine = ContinuousBatch(module, RolloutLimits(max_running=2))
    run(engine, requests(random.Random(0), 5, longest=5))
    assert [m.training for m in module.modules()] == flags
    assert module.config._attn_implementation == attention
    assert sorted(dict(module.named_buffers())) == names
    module(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    with torch.no_grad():
        module.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"request 9: .* NaN"):
        run(engine, [Request(9, (1, 2), 3, seed=0)])
    assert module.config._attn_implementation == attention


def test_bfloat16_modules_give_float32_logprobs_of_their_own_logits() -> None:
    module = model("qwen3").bfloat16()
    wanted = requests(random.Random(5), 8)
    for completion in run(ContinuousBatch(module, RolloutLimits(max_running=3)), wanted).values():
        expected = full_logprobs(module, wanted[completion.id], completion.tokens)
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.1


def test_memory_stays_within_the_cache_limit_and_small_for_short_work() -> None:
    engine = ContinuousBatch(SMALL, RolloutLimits(max_running=64, max_cache_tokens=256))
    per_token = 2 * 3 * 2 * 16 * 4
    engine.submit(requests(random.Random(6), 30, longest=60))
    while not engine.idle:
        engine.step()
        assert engine.cache_bytes <= (256 + PAGE_TOKENS) * per_token  # and a page for padding
    short = ContinuousBatch(SMALL, RolloutLimits(max_running=512))
    run(short, [Request(0, (1, 2), 4, seed=0)])
    assert short.cache_bytes <= 8 * 64 * per_token
