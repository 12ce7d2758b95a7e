"""Advantages against slow loops over samples and tokens, and the named algorithms against their papers' formulas."""

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

from realgraph.graphs.spec import Advantage
from realgraph.graphs.steps import GAE, AdaptiveKL, ApplyStep, Center, KLPenalty, Overlong, Return, Scale, Step
from realgraph.runtime.algorithms.advantages import compute
from realgraph.runtime.batch import Packed

DTYPE = torch.float64


def make(seed: int, groups: int = 4, per_group: int = 3, empty: bool = True) -> Packed:
    """A random batch whose sampled tokens have gaps (tool output); sample 2 may have none; poison off the mask."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n = groups * per_group
    lengths = tuple(rng.randint(2, 14) for _ in range(n))
    mask = torch.cat([torch.rand(length, generator=generator) < 0.7 for length in lengths])
    starts = [sum(lengths[:i]) for i in range(n)]
    for i, start in enumerate(starts):
        mask[start] = False
        mask[start + 1] = True
        if empty and i == 2:
            mask[start : start + lengths[i]] = False
    total = sum(lengths)

    def draw(scale: float) -> Tensor:
        values = torch.randn(total, generator=generator, dtype=DTYPE) * scale
        return torch.where(mask, values, torch.full_like(values, 1e6))

    return Packed(
        tokens=torch.zeros(total, dtype=torch.int64),
        lengths=lengths,
        mask=mask,
        samples=tuple(range(50, 50 + n)),
        groups=tuple(7 * (i // per_group) for i in range(n)),
        token_keys={
            "behaviour_logprobs": draw(0.5),
            "ref_logprobs": draw(0.5),
            "values": draw(1.0),
            "process": draw(1.0),
        },
        sample_keys={
            "reward": torch.randn(n, generator=generator, dtype=DTYPE),
            "greedy": torch.randn(n, generator=generator, dtype=DTYPE),
        },
    )


def run(batch: Packed, steps: dict[str, Step | None], reads: tuple[str, ...] = ("reward",)) -> list[list[float]]:
    """Advantages of the sampled tokens, per sample; the others must be exactly zero."""
    outputs, _, _ = compute(Advantage(steps, reads=reads), batch, {})
    found = outputs["advantages"]
    assert bool((found[~batch.mask] == 0).all())
    return masked(batch, found)


def masked(batch: Packed, values: Tensor) -> list[list[float]]:
    lengths = list(batch.lengths)
    return [v[m].tolist() for v, m in zip(torch.split(values, lengths), torch.split(batch.mask, lengths), strict=True)]


def spread(batch: Packed, values: list[float]) -> list[list[float]]:
    return [[value] * len(tokens) for value, tokens in zip(values, masked(batch, batch.tokens), strict=True)]


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    """True where all values are equal to float32 precision, which is what `compute` gives."""
    flat, other = [x for row in found for x in row], [x for row in expected for x in row]
    return [len(row) for row in found] == [len(row) for row in expected] and flat == pytest.approx(
        other, rel=2e-6, abs=2e-6
    )


def members(batch: Packed, i: int) -> list[int]:
    return [j for j in range(batch.n_samples) if batch.groups[j] == batch.groups[i]]


@pytest.mark.parametrize("seed", range(5))
def test_baselines_and_scales_of_samples(seed: int) -> None:
    batch = make(seed)
    r = batch.sample_keys["reward"].tolist()
    n = len(r)
    group = [[r[j] for j in members(batch, i)] for i in range(n)]
    cases: list[tuple[dict[str, Step | None], list[float]]] = [
        ({}, r),
        ({"center": Center()}, [r[i] - statistics.mean(group[i]) for i in range(n)]),
        (
            {"center": Center(), "scale": Scale()},
            [(r[i] - statistics.mean(group[i])) / (statistics.stdev(group[i]) + 1e-6) for i in range(n)],
        ),
        (
            {"center": Center("leave_one_out")},
            [r[i] - (sum(group[i]) - r[i]) / (len(group[i]) - 1) for i in range(n)],
        ),
        ({"center": Center("batch")}, [x - statistics.mean(r) for x in r]),
        (
            {"center": Center("key", "greedy")},
            (batch.sample_keys["reward"] - batch.sample_keys["greedy"]).tolist(),
        ),
        (
            {"scale": Scale("batch", 0.0), "center": Center()},
            [(r[i] - statistics.mean(group[i])) / statistics.stdev(r) for i in range(n)],
        ),
        ({"center": None, "scale": None}, r),
    ]
    for steps, expected in cases:
        assert close(run(batch, steps), spread(batch, expected)), list(steps)


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_by_loops(seed: int) -> None:
    """KL penalty per token, return, then centre and scale over the sampled tokens of the batch."""
    batch = make(seed)
    steps: dict[str, Step | None] = {
        "kl_penalty": KLPenalty("ref_logprobs", 0.1),
        "return": Return(0.9),
        "center": Center("batch"),
        "scale": Scale("batch", 0.0),
    }
    gaps = masked(batch, batch.token_keys["behaviour_logprobs"] - batch.token_keys["ref_logprobs"])
    returns: list[list[float]] = []
    for gap, reward in zip(gaps, batch.sample_keys["reward"].tolist(), strict=True):
        rewards = [-0.1 * g + (reward if t == len(gap) - 1 else 0.0) for t, g in enumerate(gap)]
        returns.append([sum(0.9 ** (u - t) * rewards[u] for u in range(t, len(gap))) for t in range(len(gap))])
    flat = [x for row in returns for x in row]
    mean, deviation = statistics.mean(flat), statistics.stdev(flat)
    assert close(run(batch, steps), [[(x - mean) / deviation for x in row] for row in returns])
    outputs, _, _ = compute(Advantage(steps), batch, {})
    assert close(masked(batch, outputs["returns"]), returns)


@pytest.mark.parametrize("seed", range(10))
def test_gae_is_the_recursion_over_sampled_tokens(seed: int) -> None:
    batch = make(seed)
    gamma, lam = 0.98, 0.9
    steps: dict[str, Step | None] = {
        "kl_penalty": KLPenalty("ref_logprobs", 0.2, "k3"),
        "gae": GAE(gamma, lam),
    }
    values = masked(batch, batch.token_keys["values"])
    behaviour, ref = (masked(batch, batch.token_keys[k]) for k in ("behaviour_logprobs", "ref_logprobs"))
    expected: list[list[float]] = []
    for i, reward in enumerate(batch.sample_keys["reward"].tolist()):
        n, following, row = len(values[i]), 0.0, []
        for t in reversed(range(n)):
            log_ratio = behaviour[i][t] - ref[i][t]
            r = -0.2 * (math.exp(-log_ratio) - 1 + log_ratio) + (reward if t == n - 1 else 0.0)
            delta = r + gamma * (values[i][t + 1] if t < n - 1 else 0.0) - values[i][t]
            following = delta + gamma * lam * following
            row.append(following)
        expected.append(row[::-1])
    assert close(run(batch, steps), expected)
    outputs, _, metrics = compute(Advantage(steps), batch, {})
    returns = [[a + v for a, v in zip(x, y, strict=True)] for x, y in zip(expected, values, strict=True)]
    assert close(masked(batch, outputs["returns"]), returns)
    left, whole = (statistics.pvariance(x for row in rows for x in row) for rows in (expected, returns))
    assert metrics["explained_variance"].value == pytest.approx(1 - left / whole)


@pytest.mark.parametrize("seed", range(5))
def test_baselines_and_scales_of_tokens(seed: int) -> None:
    batch = make(seed)
    rows = masked(batch, batch.token_keys["process"])
    reads = ("process",)
    n = batch.n_samples
    of_group = [[x for j in members(batch, i) for x in rows[j]] for i in range(n)]
    others = [[x for j in members(batch, i) if j != i for x in rows[j]] for i in range(n)]
    values = masked(batch, batch.token_keys["values"])
    cases: list[tuple[dict[str, Step | None], list[list[float]]]] = [
        ({"center": Center()}, [[x - statistics.mean(of_group[i]) for x in rows[i]] for i in range(n)]),
        (
            {"center": Center("leave_one_out")},
            [[x - statistics.mean(others[i]) for x in rows[i]] for i in range(n)],
        ),
        ({"scale": Scale()}, [[x / (statistics.stdev(of_group[i]) + 1e-6) for x in rows[i]] for i in range(n)]),
        (
            {"center": Center("key", "values")},
            [[x - v for x, v in zip(a, b, strict=True)] for a, b in zip(rows, values, strict=True)],
        ),
        (
            {"center": Center("key", "greedy")},
            [[x - float(batch.sample_keys["greedy"][i]) for x in rows[i]] for i in range(n)],
        ),
    ]
    for steps, expected in cases:
        assert close(run(batch, steps, reads=reads), expected), steps


@pytest.mark.parametrize("per_token", [False, True])
def test_overlong_is_the_papers_line(per_token: bool) -> None:
    lengths = (6, 11, 13, 15, 31)
    batch = Packed(
        tokens=torch.zeros(sum(lengths), dtype=torch.int64),
        lengths=lengths,
        mask=torch.cat([torch.arange(n) > 0 for n in lengths]),
        sample_keys={"reward": torch.ones(5)},
        token_keys={"process": torch.zeros(sum(lengths))},
    )
    steps: dict[str, Step | None] = {"overlong": Overlong(10, 14)}
    penalties = [0.0, 0.0, -0.5, -1.0, -1.0]
    if per_token:
        expected = [[0.0] * (n - 2) + [p] for n, p in zip(lengths, penalties, strict=True)]
        assert close(run(batch, steps, reads=("process",)), expected)
    else:
        assert close(run(batch, steps), spread(batch, [1 + p for p in penalties]))


def test_the_adaptive_kl_follows_its_target_and_is_carried() -> None:
    batch = make(0)
    coef = AdaptiveKL(init=0.1, target=2.0, horizon=100.0)
    call = Advantage({"kl_penalty": KLPenalty("ref_logprobs", coef), "return": Return()})
    _, state, metrics = compute(call, batch, {})
    gaps = masked(batch, batch.token_keys["behaviour_logprobs"] - batch.token_keys["ref_logprobs"])
    n = sum(bool(row) for row in gaps)
    per_sample = sum(x for row in gaps for x in row) / n
    expected = 0.1 * (1 + min(max(per_sample / 2.0 - 1, -0.2), 0.2) * n / 100.0)
    assert state == {"kl_coef": pytest.approx(expected)}
    assert metrics["kl_coef"].value == 0.1
    assert metrics["kl_per_sample"].value == pytest.approx(per_sample)
    again, _, later = compute(call, batch, state)
    assert later["kl_coef"].value == state["kl_coef"]
    fixed = Advantage({"kl_penalty": KLPenalty("ref_logprobs", state["kl_coef"]), "return": Return()})
    torch.testing.assert_close(again["advantages"], compute(fixed, batch, {})[0]["advantages"])


def test_the_users_step_may_change_the_level() -> None:
    batch = make(1)

    def shout(batch: Packed, running: Tensor, by: float) -> Tensor:
        return running * by

    def to_tokens(batch: Packed, running: Tensor) -> Tensor:
        return running[batch.sample_index()] * batch.key("values")

    call = Advantage({"a": ApplyStep("m:shout", args={"by": 3.0}), "b": ApplyStep("m:to_tokens", ("values",))})
    outputs, _, _ = compute(call, batch, {}, {"m:shout": shout, "m:to_tokens": to_tokens})
    expected = torch.where(batch.mask, 3.0 * batch.key("reward") * batch.key("values"), 0.0).float()
    torch.testing.assert_close(outputs["advantages"], expected)
    with pytest.raises(ValueError, match=r"'m:shout' was not loaded"):
        compute(call, batch, {})
    with pytest.raises(ValueError, match="returned the shape"):
        compute(call, batch, {}, {"m:shout": lambda b, r, by: r[:2], "m:to_tokens": to_tokens})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_its_sample(value: float) -> None:
    batch = make(0)
    batch.sample_keys["reward"][4] = value
    with pytest.raises(ValueError, match="the reward of sample 54 is"):
        compute(Advantage({"center": Center()}), batch, {})


def test_other_mistakes_are_named() -> None:
    batch = make(0)
    with pytest.raises(ValueError, match="needs the key 'critic'"):
        compute(Advantage({"gae": GAE(values="critic")}), batch, {})
    with pytest.raises(ValueError, match="sample 50 has no other sample in its group"):
        compute(Advantage({"center": Center("leave_one_out")}), batch.select([0, 3, 4]), {})
    batch.token_keys["values"][batch.mask.nonzero()[0, 0]] = math.nan
    with pytest.raises(ValueError, match="the advantage of sample 50 is not finite"):
        compute(Advantage({"gae": GAE()}), batch, {})


def test_equal_rewards_and_single_samples_give_zero() -> None:
    batch = make(0)
    equal = Packed(**{**vars(batch), "sample_keys": {"reward": torch.full((12,), 0.3)}})
    for eps in (0.0, 1e-6):
        steps: dict[str, Step | None] = {"center": Center(), "scale": Scale(eps=eps)}
        outputs, _, metrics = compute(Advantage(steps), equal, {})
        assert float(outputs["advantages"].abs().max()) < 1e-6
        assert metrics["equal_groups"].value == 1.0
    single = make(0, groups=3, per_group=1)
    outputs, _, _ = compute(Advantage({"center": Center(), "scale": Scale()}), single, {})
    assert float(outputs["advantages"].abs().max()) == 0.0


def test_an_empty_batch_is_no_error() -> None:
    empty = make(0).select([])
    steps: dict[str, Step | None] = {
        "kl_penalty": KLPenalty("ref_logprobs"),
        "overlong": Overlong(3, 9),
        "gae": GAE(),
        "center": Center("batch"),
        "scale": Scale("batch"),
    }
    outputs, _, _ = compute(Advantage(steps), empty, {})
    assert outputs["advantages"].shape == (0,)


def test_names_follow_the_call_and_metrics_add_up() -> None:
    batch = make(3)
    call = Advantage({"return": Return()}, reads=("greedy",), writes=("mine", "targets"))
    outputs, _, metrics = compute(call, batch, {})
    assert set(outputs) == {"mine", "targets"}
    assert outputs["mine"].dtype == torch.float32
    assert metrics["reward"].value == pytest.approx(float(batch.sample_keys["greedy"].mean()))
