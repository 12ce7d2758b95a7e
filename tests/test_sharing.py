"""Prompts computed once for all samples of a group: the same outputs and gradients as without, for fewer tokens."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.batch import Packed
from realgraph.runtime.models import Start, Wants, build
from realgraph.runtime.sharing import share_prompts
from tests import tiny


def grouped(seed: int) -> Packed:
    """Groups of one to four samples; prompts of 0 to 6 tokens, some samples without a masked token, order mixed."""
    rng = random.Random(seed)
    rows: list[tuple[int, list[int], list[bool]]] = []
    for group in range(rng.randint(1, 4)):
        prompt = [rng.randrange(tiny.VOCABULARY) for _ in range(rng.choice([0, 1, 2, 6]))]
        for _ in range(rng.randint(1, 4)):
            new = [rng.randrange(tiny.VOCABULARY) for _ in range(rng.randint(1, 9))]
            sampled = rng.random() < 0.9
            rows.append((group, prompt + new, [False] * len(prompt) + [sampled] * len(new)))
    rng.shuffle(rows)
    return Packed(
        tokens=torch.tensor([token for _, tokens, _ in rows for token in tokens]),
        lengths=tuple(len(tokens) for _, tokens, _ in rows),
        mask=torch.tensor([flag for _, _, mask in rows for flag in mask]),
        groups=tuple(group for group, _, _ in rows),
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_stands_for_equal_beginnings(seed: int) -> None:
    batch = grouped(seed)
    shared = share_prompts(batch)
    if shared is None:
        return
    sample, position = batch.sample_index(), batch.positions()
    source = shared.kept[shared.place]
    assert 0 < len(shared.kept) < batch.n_tokens
    assert torch.equal(shared.kept, source.unique())
    starts = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)
    for at, found in enumerate(source.tolist()):
        assert position[at] == position[found]
        assert batch.groups[sample[at]] == batch.groups[sample[found]]
        own, other = int(starts[sample[at]]), int(starts[sample[found]])
        assert torch.equal(batch.tokens[own : at + 1], batch.tokens[other : found + 1])
        assert at == found or not batch.mask[at]


@pytest.mark.parametrize("output", ["logprobs", "values", "scores"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_outputs_and_gradients_are_those_without_sharing(kind: str, output: str, tmp_path: Path) -> None:
    role = ModelRole(head={"logprobs": "lm", "values": "value", "scores": "score"}[output])  # type: ignore[arg-type]
    model = build(role, str(tiny.save(tmp_path, kind)), Start(torch.device("cpu"), seed=1))
    for seed in range(8):
        batch = grouped(seed)
        found = []
        for alone in (batch, replace(batch, groups=())):
            model.zero_grad()
            value = getattr(model.run(alone, Wants(output)), output)
            weight = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            (value * weight).sum().backward()
            grads = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
            found.append((value.detach(), grads))
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
