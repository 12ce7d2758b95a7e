"""A packed model beside transformers' own network of the same weights."""

from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from realgraph.runtime.models.models import PackedModel, Wants
from tests import tiny


def assert_alike(model: PackedModel, reference: Any, lengths: list[int], limit: float) -> None:
    """Log-probabilities of random samples, and the gradients of a random sum of them by every parameter, differ by
    `limit` at most, relative to the largest of a tensor."""
    batch = tiny.batch(lengths)
    found = model.run(batch, Wants()).logprobs
    assert found is not None
    expected = []
    for tokens in torch.split(batch.tokens, lengths):
        distribution = reference(tokens[None]).logits[0].log_softmax(-1)[:-1]
        expected += [distribution.new_zeros(1), distribution.gather(-1, tokens[1:, None])[:, 0]]
    torch.testing.assert_close(found, torch.cat(expected), rtol=limit / 10, atol=limit / 10)
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.autograd.backward((found * weights).sum())
    torch.autograd.backward((torch.cat(expected) * weights).sum())
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    by_file = revert_weight_conversion(reference, grads)
    named = dict(model.network.named_parameters())
    assert named.keys() == by_file.keys()
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        scale = float(by_file[name].abs().max())
        torch.testing.assert_close(parameter.grad, by_file[name], rtol=limit, atol=limit * scale + 1e-14, msg=name)
