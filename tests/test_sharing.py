"""Common beginnings computed once, unneeded ends not at all: the same outputs and gradients, for fewer tokens."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.attention import segments as segments_module
from realgraph.runtime.attention.attention import ScoreShape, bucketed
from realgraph.runtime.attention.segments import Segments
from realgraph.runtime.attention.sharing import share_prefixes
from realgraph.runtime.batch import Packed
from realgraph.runtime.models import models
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.models import Wants
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
    rng, batch = random.Random(seed), grouped(seed)
    needed = [rng.randint(1, n) for n in batch.lengths]
    shared = share_prefixes(batch, needed)
    starts = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0).tolist()
    beginnings = {
        tuple(batch.tokens[start : start + end].tolist())
        for start, n in zip(starts, needed, strict=True)
        for end in range(1, n + 1)
    }
    if shared is None:
        assert len(beginnings) == batch.n_tokens
        return
    assert len(shared.kept) == len(beginnings), "each beginning once"
    assert torch.equal(shared.kept, shared.kept.unique())
    sample, position = batch.sample_index(), batch.positions()
    for at, found in enumerate(shared.kept[shared.place].tolist()):
        if position[at] < needed[sample[at]]:
            assert position[at] == position[found]
            own, other = starts[sample[at]], starts[sample[found]]
            assert torch.equal(batch.tokens[own : at + 1], batch.tokens[other : found + 1])


@pytest.mark.parametrize("seed", range(40))
def test_slots_show_a_token_what_it_follows(seed: int) -> None:
    batch = grouped(seed)
    needed = [max(1, n - 1) for n in batch.lengths]
    shared = share_prefixes(batch, needed)
    segments = Segments(batch.lengths, torch.device("cpu"), shared)
    if shared is None or segments.fill is None or segments.back is None:
        return
    fill, back = segments.fill, segments.back
    assert torch.equal(fill[back], torch.arange(segments.n_rows))
    again = segments.again[0].tolist() if segments.again else []
    assert not set(again) & set(back.tolist())
    depth = batch.positions()[shared.kept]
    first = 0
    for (rows, width), seen in zip(segments.buckets, segments.visible(3), strict=True):
        for row in range(rows):
            slots = fill[first : first + width]
            for query in range(width):
                if seen is None:
                    continue
                visible = slots[seen[row, 0, query]].tolist()
                whole = batch.tokens[shared.kept]
                assert len(visible) == min(3, int(depth[slots[query]]) + 1)
                assert sorted(int(depth[v]) for v in visible)[-1] == depth[slots[query]]
                assert int(whole[slots[query]]) in whole[visible].tolist()
            first += width


@pytest.mark.parametrize("output", ["logprobs", "values", "scores"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_outputs_and_gradients_are_those_without_sharing(
    kind: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = ModelRole(head={"logprobs": "lm", "values": "value", "scores": "score"}[output])  # type: ignore[arg-type]
    model = build(role, str(tiny.save(tmp_path, kind)), Start(torch.device("cpu"), seed=1))
    for seed in range(12):
        batch = grouped(seed) if seed % 3 else replace(grouped(seed), groups=())
        where = batch.mask if seed % 2 and batch.mask.any() else None
        found = []
        for share in (share_prefixes, lambda *_: None):
            monkeypatch.setattr(models, "share_prefixes", share)
            model.zero_grad()
            value = getattr(model.run(batch, Wants(output, where=where)), output)
            weight = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            (value * weight).sum().backward()
            grads = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
            found.append((value.detach(), grads))
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("seed", range(30))
def test_trees_and_rows_attend_alike(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over prefix trees against attention over samples, with and without windows and soft caps."""
    batch = grouped(seed)
    shared = share_prefixes(batch, [max(1, n - 1) for n in batch.lengths])
    if shared is None:
        return
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    sinks = rng.choice([None, torch.randn(4, dtype=torch.float64, generator=draw)])
    n, shape = len(shared.kept), ScoreShape(rng.choice([None, 1, 3]), rng.choice([None, 2.0]), sinks)
    monkeypatch.setattr(segments_module, "_scores", lambda _: 0)  # trees wherever they can be had
    trees = Segments(batch.lengths, torch.device("cpu"), shared)
    rows = Segments(batch.lengths, torch.device("cpu"), replace(shared, groups=()))
    inputs = [torch.randn(n, h, 4, dtype=torch.float64, generator=draw, requires_grad=True) for h in (4, 2, 2)]
    weight = torch.randn(n, 4, 4, dtype=torch.float64, generator=draw)
    query, key, value = inputs
    ours, theirs = (bucketed((query, key, value), segments, 0.5, shape) for segments in (trees, rows))
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
