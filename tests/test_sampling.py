"""Properties of one draw: what it can pick, how often, and what it depends on."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realgraph.runtime.engine import Request
from realgraph.runtime.generate.sampling import SettingsTable, distribution, draw, stream, truncate, uniform

CPU = torch.device("cpu")


def table(requests: list[Request]) -> SettingsTable:
    made = SettingsTable(len(requests), CPU)
    for slot, request in enumerate(requests):
        made.put(slot, request)
    return made


def ask(seed: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Request:
    return Request(seed, (0,), 1, seed, temperature, top_p, top_k)


def plain_truncation(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """The oracle: the tokens that top-k and then top-p leave, by sorting in Python."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[token]) for token in order]
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p * sum(weights):
            break
        kept.add(token)
        mass += weight
    return kept


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean."""
    alive = probabilities > 0
    expected = probabilities[alive] * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities))[alive]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = int(alive.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@settings(max_examples=150)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=30), st.integers(0, 32), st.floats(0.05, 0.999), st.randoms()
)
def test_truncation_keeps_exactly_the_oracle_s_support(
    tenths: list[int], top_k: int, top_p: float, rng: random.Random
) -> None:
    ranks = list(range(len(tenths)))
    rng.shuffle(ranks)
    logits = [tenth / 10 + rank * 1e-3 for tenth, rank in zip(tenths, ranks, strict=True)]  # no two are equal
    kept = truncate(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]))[0]
    assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == plain_truncation(logits, top_k, top_p)
    assert all(kept[token] == torch.tensor(logits[token]) for token in plain_truncation(logits, top_k, top_p))


def test_ties_at_the_cut_go_to_the_lower_token() -> None:
    kept = truncate(torch.zeros(1, 5), torch.tensor([2]), torch.tensor([1.0]))
    assert torch.isfinite(kept)[0].tolist() == [True, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5)]
)
def test_frequencies_follow_the_distribution(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    n, vocabulary = 20_000, 24
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    wanted = table([ask(seed, temperature, top_p, top_k)]).view(1)
    probabilities = distribution(logits[None], wanted)[0].double().exp()
    many = table([ask(seed * n + i, temperature, top_p, top_k) for i in range(n)])
    tokens, logprobs = draw(logits.expand(n, -1), many.view(n), torch.zeros(n, dtype=torch.int64))
    assert chi_square(tokens, probabilities) < 5
    assert bool((probabilities[tokens] > 0).all())
    torch.testing.assert_close(logprobs, probabilities.log().float()[tokens])
    one = table([ask(seed, temperature, top_p, top_k)] * n)  # one stream over positions is as good as many streams
    assert chi_square(draw(logits.expand(n, -1), one.view(n), torch.arange(n))[0], probabilities) < 5


def test_logprobs_are_of_the_tempered_distribution() -> None:
    logits = torch.randn(64, 50) * 3
    requests = [ask(i, temperature=0.3 + i / 40) for i in range(64)]
    tokens, logprobs = draw(logits, table(requests).view(64), torch.arange(64))
    temperatures = torch.tensor([r.temperature for r in requests])
    expected = (logits.double() / temperatures[:, None]).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-5


def test_temperature_zero_is_argmax_with_certainty_and_leaves_the_others_alone() -> None:
    logits = torch.randn(8, 30)
    mixed = table([ask(i, temperature=0.0 if i % 2 else 1.0) for i in range(8)]).view(8)
    pure = table([ask(i) for i in range(8)]).view(8)
    positions = torch.arange(8)
    tokens, logprobs = draw(logits, mixed, positions)
    assert tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()
    assert logprobs[1::2].tolist() == [0.0] * 4
    assert tokens[::2].tolist() == draw(logits, pure, positions)[0][::2].tolist()


@settings(max_examples=60)
@given(st.integers(1, 12), st.randoms())
def test_a_row_depends_on_nothing_but_itself(n: int, rng: random.Random) -> None:
    requests = [
        ask(rng.randrange(1000), rng.choice([0.0, 0.7, 1.0]), rng.choice([0.5, 1.0]), rng.choice([0, 3]))
        for _ in range(n)
    ]
    logits = torch.randn(n, 17, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    positions = torch.tensor([rng.randrange(100) for _ in range(n)])
    tokens, logprobs = draw(logits, table(requests).view(n), positions)
    order = rng.sample(range(n), n)
    shuffled, _ = draw(logits[order], table([requests[i] for i in order]).view(n), positions[order])
    assert shuffled.tolist() == [tokens[i] for i in order]
    for i in range(n):
        alone, logprob = draw(logits[i : i + 1], table([requests[i]]).view(1), positions[i : i + 1])
        assert alone.item() == tokens[i]
        assert logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)


def splitmix(start: int, position: int) -> float:
    """The oracle of `uniform`, in Python's integers."""
    mask = (1 << 64) - 1
    word = (start + (position + 1) * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return ((word ^ (word >> 31)) >> 24) / 2**40


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**31))
def test_uniform_equals_splitmix64_in_exact_integers(seed: int, position: int) -> None:
    start = stream(seed)
    assert -(2**63) <= start < 2**63
    got = uniform(torch.tensor([start]), torch.tensor([position]))
    assert got.item() == splitmix(start, position)


def test_uniform_is_even_and_uncorrelated_over_seeds_and_positions() -> None:
    starts = torch.tensor([stream(seed) for seed in range(256)])
    grid = uniform(starts.repeat_interleave(256), torch.arange(256).repeat(256)).view(256, 256)
    assert abs(grid.mean() - 0.5) < 5 / math.sqrt(12 * 65536)
    for first, second in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 5 / 256


def test_large_batches_are_drawn_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, requests = torch.randn(33, 40), [ask(i, top_k=i % 4) for i in range(33)]
    whole = draw(logits, table(requests).view(33), torch.arange(33))
    monkeypatch.setattr("realgraph.runtime.generate.sampling._CHUNK_ELEMENTS", 200)
    parts = draw(logits, table(requests).view(33), torch.arange(33))
    assert whole[0].tolist() == parts[0].tolist()
    torch.testing.assert_close(whole[1], parts[1])


def test_extremes_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-torch.inf, 5.0, -torch.inf]])
    tokens, logprobs = draw(logits, table([ask(1, temperature=1e-4), ask(2)]).view(2), torch.tensor([0, 0]))
    assert tokens.tolist() == [0, 1]
    assert logprobs.tolist() == [0.0, 0.0]
    half = torch.randn(4, 30).bfloat16()
    assert draw(half, table([ask(i) for i in range(4)]).view(4), torch.arange(4))[1].dtype == torch.float32


def test_nan_logits_give_a_nan_logprob() -> None:
    logits = torch.full((2, 5), torch.nan)
    _, logprobs = draw(logits, table([ask(1), ask(2, temperature=0.0)]).view(2), torch.tensor([0, 0]))
    assert bool(logprobs.isnan().all())
