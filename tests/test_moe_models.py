"""Mixtures of experts against transformers' own: log-probabilities, gradients, routes, balance, files, generation."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.maths import CrossEntropy, LoadBalance, Loss, TokenMean
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.runtime.algorithms import losses
from realgraph.runtime.engine import RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.parallel.experts.block import SparseBlock
from realgraph.runtime.parallel.experts.routing import RoutingRecord, choose, load_balance, load_metrics, record_of
from realgraph.runtime.parallel.groups import Ranks
from tests import tiny
from tests.against_transformers import assert_alike
from tests.equivalence.training import keep_norms_exact
from tests.rollouts import requests, run

CPU = torch.device("cpu")
LENGTHS = [9, 3, 17, 1, 8]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "normalised": ("qwen3_moe", {}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "every second layer": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "one expert a token": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = MODELS[request.param]
    return tiny.save(tmp_path_factory.mktemp("model"), kind, eos_token_id=None, **changes)


def exact(model: Any) -> Any:
    """A transformers model that computes norms and routes in float64: its own round to float32 inside."""
    keep_norms_exact(model)
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(_route, module)
    return model


def _route(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, module.weight)
    weights, experts = logits.softmax(-1).topk(module.top_k)
    return logits, weights / (weights.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else 1), experts


def reference_of(folder: Path) -> Any:
    plain = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": torch.float64}
    return exact(AutoModelForCausalLM.from_pretrained(folder, **plain))


def ours_of(folder: Path) -> PackedModel:
    model = build(ModelRole(dtype="float64"), str(folder), Start(CPU))
    keep_norms_exact(model)
    return model


def test_logprobs_and_gradients_equal_transformers_in_float64(folder: Path) -> None:
    assert_alike(ours_of(folder), reference_of(folder), LENGTHS, 1e-10)


def test_the_planner_counts_the_parameters_that_there_are(folder: Path) -> None:
    network = build(ModelRole(), str(folder), Start(CPU)).network
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), Where())
    assert spec.n_params() == sum(parameter.numel() for parameter in network.parameters())
    blocks = [module for module in network.modules() if isinstance(module, SparseBlock)]
    assert len(blocks) == spec.expert_layers
    assert {(block.settings.n_experts, block.settings.top_k) for block in blocks} == {
        (spec.experts, spec.experts_per_token)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_computes_in_float32(dtype: torch.dtype) -> None:
    """Experts whose logits are the same number in the model's dtype are told apart."""
    draw = torch.Generator().manual_seed(0)
    x, row = torch.randn(64, 32, generator=draw).to(dtype), torch.randn(32, generator=draw)
    router = (row + 0.01 * torch.randn(8, 32, generator=draw)).to(dtype)
    found, expected = (choose(a, b, 2, normalised=True) for a, b in ((x, router), (x.double(), router.double())))
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights.double(), expected.weights, rtol=1e-5, atol=1e-6)
    rounded = F.linear(x, router).topk(2).indices
    assert not torch.equal(rounded, expected.experts)


def test_balance_and_load_equal_transformers(folder: Path) -> None:
    model, reference, batch = ours_of(folder), reference_of(folder), tiny.batch([23])
    found = model.run(batch, Wants(balance=True))
    assert found.balance is not None
    logits = reference(batch.tokens[None], output_router_logits=True).router_logits
    config = reference.config
    expected: Any = load_balancing_loss_func(logits, config.num_local_experts, config.num_experts_per_tok)
    torch.testing.assert_close(found.balance, expected.double(), rtol=1e-6, atol=1e-7)
    torch.autograd.backward(found.balance)
    torch.autograd.backward(expected)
    gates = {n: p.grad for n, p in reference.named_parameters() if n.endswith("gate.weight")}
    for (name, grad), block in zip(gates.items(), _blocks(model), strict=True):
        torch.testing.assert_close(block.router_module.weight.grad, grad, rtol=1e-5, atol=1e-7, msg=name)
    record = record_of(model.network)
    assert record is not None
    assert found.expert_load is not None
    metrics = load_metrics(found.expert_load, record)
    chosen = [F.one_hot(one.topk(config.num_experts_per_tok).indices, one.shape[-1]).sum((0, 1)) for one in logits]
    imbalance = [float(counts.max() / counts.double().mean()) for counts in chosen]
    assert metrics["load_imbalance"] == pytest.approx(sum(imbalance) / len(imbalance))
    loads = torch.stack([counts / counts.double().mean() for counts in chosen]).mean(0)
    assert [metrics[f"expert_load_{i}"] for i in range(config.num_local_experts)] == pytest.approx(loads.tolist())
    entropies = [torch.distributions.Categorical(logits=one).entropy().mean() for one in logits]
    assert metrics["router_entropy"] == pytest.approx(float(torch.stack(entropies).mean().detach()))


def test_balance_is_of_all_tokens_where_samples_begin_alike(folder: Path) -> None:
    """A CPU computes a common beginning once, and no token behind the last that is trained on."""
    model, reference = build(ModelRole(dtype="float32"), str(folder), Start(CPU)), reference_of(folder)
    batch = tiny.batch([9, 12, 7])
    tokens = batch.tokens.clone()
    tokens[9:14] = tokens[21:26] = tokens[:5]
    mask = batch.mask.clone()
    mask[18:21] = False
    batch = replace(batch, tokens=tokens, mask=mask)
    parts = [reference(one[None], output_router_logits=True).router_logits for one in tokens.split([9, 12, 7])]
    logits: Any = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
    config = reference.config
    expected: Any = load_balancing_loss_func(logits, config.num_local_experts, config.num_experts_per_tok)
    found = model.run(batch, Wants(balance=True, where=mask))
    assert found.balance is not None
    torch.testing.assert_close(found.balance, expected.double(), rtol=1e-5, atol=1e-5)


def test_load_adds_over_workers_with_layers_of_their_own() -> None:
    """Stages of a pipeline: each has the rows of its layers, and the balance is of the sum of their totals."""
    draw = torch.Generator().manual_seed(0)
    routes = [choose(torch.randn(9, 4, generator=draw), torch.randn(3, 4, generator=draw), 1, normalised=True)] * 2
    whole, *stages = (RoutingRecord(3, 3) for _ in range(3))
    for record in (whole, *stages):
        record.begin()
    for layer, one in enumerate(routes):
        whole.add(layer, one, 7)
        stages[layer].add(layer, one, 7)
    assert torch.equal(stages[0].load() + stages[1].load(), whole.load())
    assert load_metrics(whole.load(), whole)["load_imbalance"] >= 1
    with pytest.raises(ValueError, match="2 of 3 layers of experts are here"):
        whole.balance([Ranks(CPU)], CPU)
    summed = stages[0].totals(CPU) + stages[1].totals(CPU)
    assert torch.equal(load_balance(summed, [Ranks(CPU)]), load_balance(whole.totals(CPU), [Ranks(CPU)]))


def _blocks(model: PackedModel) -> list[SparseBlock]:
    return [module for module in model.modules() if isinstance(module, SparseBlock)]


def test_the_balance_is_a_term_of_the_loss(folder: Path) -> None:
    model, batch = ours_of(folder), tiny.batch([9, 7], dtype=torch.float64)
    plain = Loss({"nll": CrossEntropy()}, TokenMean())
    balanced = Loss({**plain.terms, "balance": LoadBalance(coef=0.25)}, TokenMean())
    assert not losses.needs(plain).balance
    assert losses.needs(balanced).balance
    outputs = model.run(batch, Wants(balance=True))
    whole = losses.denominator(plain, batch)
    without, (value, metrics) = (
        losses.evaluate(plain, batch, outputs, whole)[0],
        losses.evaluate(balanced, batch, outputs, whole),
    )
    assert outputs.balance is not None
    assert float((value - without).detach()) == pytest.approx(0.25 * float(outputs.balance.detach()))
    assert metrics["balance_loss"].value == pytest.approx(0.25 * float(outputs.balance.detach()))
    with pytest.raises(ValueError, match="takes a mixture of experts, and the model has none"):
        losses.evaluate(balanced, batch, replace(outputs, balance=None), whole)


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    gone = sorted(name for name in tensors if ".experts.2." in name)[1]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"the checkpoint lacks '{gone}'"):
        build(ModelRole(), str(tmp_path), Start(CPU))


@pytest.mark.slow
@pytest.mark.parametrize("asks_for_logits", [False, True])
def test_greedy_generation_equals_transformers(folder: Path, tmp_path: Path, asks_for_logits: bool) -> None:
    config = {**json.loads((folder / "config.json").read_text()), "output_router_logits": asks_for_logits}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    reference: Any = AutoModelForCausalLM.from_pretrained(folder)
    wanted = [replace(request, temperature=0.0) for request in requests(random.Random(3), 4, longest=24)]
    engine = ContinuousBatch(build(ModelRole(), str(tmp_path), Start(CPU)).network, RolloutLimits(max_running=3))
    done = run(engine, wanted)
    for request in wanted:
        ids = torch.tensor([request.prompt])
        n = request.max_new_tokens
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)
        assert list(done[request.id].tokens) == expected[0, len(request.prompt) :].tolist()
