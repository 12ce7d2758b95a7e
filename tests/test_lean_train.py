"""The lean walk against transformers' own forward: outputs and all gradients, on grouped and ragged batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realgraph.graphs.spec import ModelRole
from realgraph.runtime.cpu import train
from realgraph.runtime.cpu.train import lean_trains
from realgraph.runtime.models import models
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.train.recompute import recomputing
from tests import tiny
from tests.test_sharing import grouped

HEADS: dict[str, Any] = {"logprobs": "lm", "values": "value", "scores": "score"}
Patch = pytest.MonkeyPatch


def plain_norm(self: Any, x: Tensor) -> Tensor:
    """transformers' norm but for its detour through float32."""
    out: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return out


def gradients(model: PackedModel, wants: Wants, seeds: range) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of a few batches, and the gradients that add up over them."""
    model.zero_grad()
    outputs = []
    for seed in seeds:
        batch = grouped(seed) if seed % 3 else replace(grouped(seed), groups=())
        out = model.run(batch, wants)
        found = [value for value in (out.logprobs, out.values, out.scores, out.entropy) if value is not None]
        draw = torch.Generator().manual_seed(seed)
        torch.autograd.backward(
            [(value * torch.randn(value.shape, generator=draw)).sum() for value in found if value.requires_grad]
        )
        outputs += [value.detach().clone() for value in found]
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: PackedModel, wants: Wants, patch: Patch, tolerance: float) -> None:
    patch.setattr(models, "lean_trains", lambda _: True)
    ours = gradients(model, wants, range(6))
    patch.setattr(models, "lean_trains", lambda _: False)
    theirs = gradients(model, wants, range(6))
    for found, expected in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert ours[1].keys() == theirs[1].keys() == {name for name, _ in model.named_parameters()}
    for name, expected in theirs[1].items():
        assert (ours[1][name] - expected).norm() <= tolerance * expected.norm().clamp(min=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("output", ["logprobs", "values", "scores"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_outputs_and_gradients_are_the_forwards(
    kind: str, tied: bool, output: str, dtype: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tiny.save(tmp_path, kind, tie_word_embeddings=tied)
    role = ModelRole(head=HEADS[output], dtype=dtype, trainable=True)  # type: ignore[arg-type]
    model = build(role, str(folder), Start(torch.device("cpu")))
    if output != "logprobs":
        model.network.score.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    if dtype == "float64":
        monkeypatch.setattr(type(model.network.model.norm), "forward", plain_norm)
    else:
        assert lean_trains(model.network)
    compare(model, Wants(output, 0.7, "gradient"), monkeypatch, 3e-5 if dtype == "float32" else 1e-10)


@pytest.mark.parametrize("output", ["logprobs", "values"])
@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_layers_that_are_computed_again_have_the_forwards_gradients(
    kind: str, output: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    role = ModelRole(head=HEADS[output], trainable=True)
    model = build(role, str(tiny.save(tmp_path, kind)), Start(torch.device("cpu")))
    counted: list[str] = []
    walked = train._through_layer

    def count(*arguments: Any, **named: Any) -> Tensor:
        counted.append("")
        return walked(*arguments, **named)

    monkeypatch.setattr(train, "_through_layer", count)
    with recomputing(model.network, "full"):
        assert lean_trains(model.network)
        compare(model, Wants(output, 0.7, "gradient"), monkeypatch, 3e-5)
    assert len(counted) == 6 * 2 * model.network.config.num_hidden_layers  # of six batches, forward and again


def test_the_walk_reads_the_newest_weights(monkeypatch: Patch, tmp_path: Path) -> None:
    model = build(ModelRole(), str(tiny.save(tmp_path, "qwen2")), Start(torch.device("cpu")))
    for _ in range(2):
        compare(model, Wants(), monkeypatch, 3e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.requires_grad_(False)
    assert not any(out.requires_grad for out in [model.run(grouped(1), Wants()).logprobs] if out is not None)


def test_what_the_walk_does_not_know_takes_its_own_forward() -> None:
    for kind in tiny.KINDS:
        assert lean_trains(tiny.network(kind)) == ("gemma" not in kind and kind not in tiny.MIXTURES)
    assert not lean_trains(tiny.network("llama", hidden_act="gelu"))
    assert not lean_trains(tiny.network("llama").double())
    network = tiny.network("llama")
    for _ in range(2):
        with recomputing(network, "selective"):
            assert not lean_trains(network)
        assert lean_trains(network)
    network = tiny.network("llama")
    network.model.layers[0].register_full_backward_hook(lambda *_: None)
    assert not lean_trains(network)
