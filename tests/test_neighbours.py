"""The overrides at the head of grpo.yaml give the objectives of their papers: value and gradient beside plain loops."""

import math
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor

from realgraph.graphs.spec import Advantage, Train
from realgraph.run_file.open_graph import open_graph
from realgraph.runtime.algorithms.advantages import compute
from realgraph.runtime.algorithms.losses import denominator, evaluate
from realgraph.runtime.batch import Outputs, Packed
from tests.test_algorithms import NEIGHBOURS

PROMPT, LENGTHS = 2, (3, 1, 4, 2, 4, 3, 2, 1)  # two groups of four; limits of length are 4 and 2 tokens
REWARDS = {"mixed": (1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.25), "equal": (0.1,) * 8}
SPANS = [(sum(LENGTHS[:i]) + PROMPT * (i + 1), sum(LENGTHS[: i + 1]) + PROMPT * (i + 1)) for i in range(len(LENGTHS))]


def deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-6


def centred(rewards: list[float], divisor: Callable[[list[float]], float]) -> list[list[float]]:
    """(r - the group's mean) / divisor(group), on every token."""
    found = []
    for i, n in enumerate(LENGTHS):
        group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
        found.append([(rewards[i] - sum(group) / 4) / divisor(group)] * n)
    return found


def advantages_of(name: str, rewards: list[float], kl: list[list[float]]) -> list[list[float]]:
    """By the papers, an item a token of each sample."""
    match name:
        case "Dr. GRPO":
            return centred(rewards, lambda group: 1.0)
        case "RLOO":
            others = [sum(rewards[i // 4 * 4 : i // 4 * 4 + 4]) - r for i, r in enumerate(rewards)]
            return [[r - other / 3] * n for r, other, n in zip(rewards, others, LENGTHS, strict=True)]
        case "LitePPO":
            return centred(rewards, lambda group: deviation(rewards))
        case "DAPO":
            return centred([r - min(max((n - 2) / 2, 0), 1) for r, n in zip(rewards, LENGTHS, strict=True)], deviation)
        case "REINFORCE++":
            returns = [[r - 0.01 * sum(k[t:]) for t in range(len(k))] for r, k in zip(rewards, kl, strict=True)]
            flat = [value for row in returns for value in row]
            return [[(value - sum(flat) / len(flat)) / deviation(flat) for value in row] for row in returns]
        case _:
            return centred(rewards, deviation)


def objective(name: str, ratios: list[Tensor], logprobs: list[Tensor], advantages: list[list[float]]) -> Tensor:
    """The objective to maximise, by the papers. ratios: policy / old policy of each token of each sample."""
    low, high = {"DAPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
    sums, tokens = [], sum(LENGTHS)
    for ratio, logprob, advantage in zip(ratios, logprobs, advantages, strict=True):
        a = torch.tensor(advantage, dtype=torch.float64)
        match name:
            case "RLOO":
                gain = ratio * a
            case "CISPO":
                gain = ratio.detach().clamp(max=1.2) * a * logprob
            case "GSPO":
                s = ratio.log().mean().exp()
                gain = torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
            case _:
                gain = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        sums.append(gain.mean() if name == "GSPO" else gain.sum())
    match name:
        case "Dr. GRPO":
            return torch.stack(sums).sum() / (8 * 4)  # the longest sample has 4 tokens
        case "GSPO" | "RLOO":
            return torch.stack(sums).mean()
        case _:
            return torch.stack(sums).sum() / tokens


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("stepped", [0.0, 0.3])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_an_override_is_what_its_paper_says(name: str, stepped: float, rewards: str) -> None:
    """stepped: how far the policy has moved from the one that sampled."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS) + PROMPT * len(LENGTHS)
    old, ref, moved = (torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(3))
    old, ref = (0.5 * old - 1.5).float().double(), (0.5 * ref - 1.5).float().double()
    logprobs = (old + stepped * moved).requires_grad_()
    mask = torch.zeros(total, dtype=torch.bool)
    for start, end in SPANS:
        mask[start:end] = True
    keys = {"behaviour_logprobs": old, "proximal_logprobs": old, "ref_logprobs": ref}
    lengths, groups = tuple(PROMPT + n for n in LENGTHS), (0,) * 4 + (1,) * 4
    scores = {"reward": torch.tensor(REWARDS[rewards], dtype=torch.float64)}
    graph = open_graph("grpo", NEIGHBOURS[name])
    advantage, train = graph.calls["advantage"], graph.calls["train"]
    assert isinstance(advantage, Advantage) and isinstance(train, Train)
    batch = Packed(torch.zeros(total, dtype=torch.int64), lengths, mask, tuple(range(8)), groups, keys, scores)
    found, _, _ = compute(advantage, batch, {})
    batch = Packed(batch.tokens, lengths, mask, batch.samples, groups, {**keys, **found}, scores)
    loss, _ = evaluate(train.loss, batch, Outputs(logprobs=logprobs), denominator(train.loss, batch))

    kl = [(old - ref)[start:end].tolist() for start, end in SPANS]
    wanted = advantages_of(name, list(REWARDS[rewards]), kl)
    flat = torch.tensor([value for row in wanted for value in row])
    torch.testing.assert_close(found["advantages"][mask], flat, rtol=1e-5, atol=1e-6)
    ratios = [(logprobs - old)[start:end].exp() for start, end in SPANS]
    expected = -objective(name, ratios, [logprobs[start:end] for start, end in SPANS], wanted)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    (mine,), (theirs,) = (torch.autograd.grad(value, logprobs) for value in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
