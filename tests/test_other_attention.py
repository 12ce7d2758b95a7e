"""gpt-oss and DeepSeek-V3 against transformers: attention sinks, latent attention, routers of their own; and tensors
that no step changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from realgraph.graphs.errors import ConfigError, Where
from realgraph.graphs.spec import ModelRole, Optimizer
from realgraph.planner.inputs.model_spec import spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.fixed import fixed_parts
from realgraph.runtime.models.weights import weight_specs
from realgraph.runtime.parallel.experts.routers import GroupedRouter, GroupLimit, Router
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.rollout.weights.staged import checkpoint_parts
from realgraph.runtime.train.engine import open_engine
from tests import tiny
from tests.against_transformers import assert_alike
from tests.engines import call
from tests.equivalence.training import keep_norms_exact

CPU = torch.device("cpu")
LENGTHS = [9, 3, 17, 1, 8]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks": ("gpt_oss", {}),
    "one expert a token": ("gpt_oss", {"num_experts_per_tok": 1, "attention_bias": False}),
    "latents": ("deepseek_v3", {"num_hidden_layers": 3}),
    "queries at once": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False}),
    "turned by halves": ("deepseek_v3", {"rope_interleave": False, "n_shared_experts": 2}),
    "longer by YaRN": (
        "deepseek_v3",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
            }
        },
    ),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = MODELS[request.param]
    return tiny.save(tmp_path_factory.mktemp("model"), kind, **changes)


def test_logprobs_and_gradients_equal_transformers_in_float64(folder: Path) -> None:
    """But for the routers of DeepSeek-V3, which transformers computes in float32."""
    model = build(ModelRole(dtype="float64"), str(folder), Start(CPU))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, **plain)
    for network in (model, reference):
        keep_norms_exact(network)
    limit = 1e-10 if model.config.model_type == "gpt_oss" else 1e-5
    assert_alike(model, reference, LENGTHS, limit)


def test_the_planner_counts_the_parameters_that_there_are(folder: Path) -> None:
    network = build(ModelRole(), str(folder), Start(CPU)).network
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), Where())
    assert spec.n_params() == sum(parameter.numel() for parameter in network.parameters())


@given(st.data())
@settings(max_examples=60)
def test_routers_choose_as_those_of_transformers(data: st.DataObject) -> None:
    groups, each = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    best = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, best * each))
    normalised = data.draw(st.booleans())
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(7, 6, generator=draw)
    shape = {"num_hidden_layers": 2, "hidden_size": 6, "num_experts_per_tok": top_k}
    grouped = {"n_routed_experts": groups * each, "n_group": groups, "topk_group": best, "norm_topk_prob": normalised}
    ours: tuple[Any, Any] = (
        GroupedRouter((groups * each, 6), GroupLimit(top_k, groups, best, normalised, 1.5)),
        Router((groups * each, 6), top_k, normalised=True, biased=True),
    )
    theirs: tuple[Any, Any] = (
        DeepseekV3TopkRouter(tiny.config("deepseek_v3", **shape, **grouped)),
        GptOssTopKRouter(tiny.config("gpt_oss", **shape, num_local_experts=groups * each)),
    )
    for own, other in zip(ours, theirs, strict=True):
        with torch.no_grad():
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
        own.load_state_dict(other.state_dict())
        found = own.choose(x, None)
        _, weights, experts = other(x)
        expected = torch.zeros_like(found.probabilities).scatter(1, experts, weights)
        torch.testing.assert_close(torch.zeros_like(expected).scatter(1, found.experts, found.weights), expected)
        torch.testing.assert_close(found.probabilities.sum(-1), torch.ones(7))
        again = own.choose(x, found.experts)
        torch.testing.assert_close(again.weights, found.weights)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("latent"), "deepseek_v3")


def test_what_no_step_changes_keeps_its_float32_through_training_and_checkpoints(latent: Path, tmp_path: Path) -> None:
    settings = TrainSettings(optimizer=Optimizer(weight_decay=0.5), total_steps=4)
    alone = LayoutRanks.alone(CPU)
    engine = open_engine(
        ModelRole(trainable=True, dtype="bfloat16"), str(latent), Layout(DeviceMesh(0, 1)), alone, settings
    )
    stored = load_file(latent / "model.safetensors")[BIAS]
    assert stored.dtype == torch.float32 and stored.any() and not torch.equal(stored.bfloat16().float(), stored)
    engine.train(call(), [tiny.batch([9, 12, 7, 10])])
    assert torch.equal(fixed_parts(engine.model.network)[BIAS].values, stored)
    engine.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved[BIAS].dtype == torch.float32 and torch.equal(saved[BIAS], stored)
    assert {tensor.dtype for name, tensor in saved.items() if name != BIAS} == {torch.bfloat16}
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, stored)


def test_servers_get_what_steps_change(latent: Path) -> None:
    """From a checkpoint, whose biases a server has read at its start."""
    network = build(ModelRole(), str(latent), Start(CPU)).network
    sent = {part.name for part in checkpoint_parts(latent, weight_specs(network))}
    assert sent == {name for name, _ in network.named_parameters()}
    assert BIAS in load_file(latent / "model.safetensors")


def test_layers_that_predict_further_tokens_are_left_aside_and_a_missing_bias_is_named(
    latent: Path, tmp_path: Path
) -> None:
    tensors = load_file(latent / "model.safetensors")
    (tmp_path / "config.json").write_bytes((latent / "config.json").read_bytes())
    further = {"model.layers.2.eh_proj.weight": torch.ones(3), "model.layers.2.mlp.gate.weight": torch.ones(2)}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    found = build(ModelRole(), str(tmp_path), Start(CPU)).network
    assert torch.equal(fixed_parts(found)[BIAS].values, tensors.pop(BIAS))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks '{BIAS}'"):
        build(ModelRole(), str(tmp_path), Start(CPU))
