"""Shapes of models: parameters as transformers counts them, the shipped table, and where a config.json comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from realgraph.graphs.errors import ConfigError, Where, suggest
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.memory import memory
from realgraph.planner.inputs.model_configs import known_models, load_model_spec
from realgraph.planner.inputs.model_spec import ARCHITECTURES, ModelSpec, spec_from_config
from realgraph.planner.plan.layout import DeviceMesh, Layout

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 50,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 14, "n_group": 2},
}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ARCHITECTURES if kind != "qwen3_moe"),
    *(
        (kind, {"num_key_value_heads": 2, "head_dim": 24})
        for kind in ARCHITECTURES
        if kind not in ("qwen2", "qwen3_moe")
    ),
    *((kind, {"tie_word_embeddings": True}) for kind in ("llama", "qwen2", "qwen3", "mistral")),
    ("gemma", {"tie_word_embeddings": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"attention_bias": True}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen2", {"num_key_value_heads": None}),
    ("mixtral", {"num_local_experts": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": False, "tie_word_embeddings": True},
    ),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "attention_bias": True, "first_k_dense_replace": 1}),
    ("qwen3_moe", {**EXPERTS, "num_key_value_heads": 2}),
    ("qwen3_moe", {**EXPERTS, "num_key_value_heads": 2, "mlp_only_layers": [0]}),
    ("qwen3_moe", {**EXPERTS, "num_key_value_heads": 4, "decoder_sparse_step": 2, "head_dim": 32}),
]
LAYOUT = Layout(DeviceMesh(0, 1))


@pytest.mark.parametrize(("kind", "extra"), SHAPES, ids=lambda value: str(value))
def test_n_params_is_what_transformers_builds(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **{**BASE, **extra})
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    network.tie_weights()
    config.save_pretrained(tmp_path)  # as a user's folder has it: without what equals a default
    spec = load_model_spec(str(tmp_path), Where())
    assert spec.n_params() == sum(parameter.numel() for parameter in set(network.parameters()))
    embedding = spec.vocab * spec.hidden
    assert spec.n_params("value") == spec.n_params() - (0 if spec.tied else embedding) + spec.hidden


@pytest.mark.parametrize("name", sorted(known_models()))
def test_the_shipped_table_gives_the_published_number_of_parameters(name: str) -> None:
    row = known_models()[name]
    spec = spec_from_config(row, Where())
    assert spec.n_params() == row["n_params"]
    assert spec.active_params() < spec.n_params()
    assert load_model_spec(name, Where(), None) == spec


def saved_bytes(network: torch.nn.Module, tokens: int) -> int:
    """Bytes of distinct storages that autograd keeps of a forward pass over `tokens`, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma3_text"])
def test_activations_are_what_autograd_keeps(kind: str, dtype: memory.DType) -> None:
    shape = {**BASE, "hidden_size": 256, "intermediate_size": 640, "num_key_value_heads": 2, "head_dim": 64}
    per_layer = []
    for layers in (1, 2):
        config = AutoConfig.for_model(kind, **{**shape, "num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        per_layer.append(saved_bytes(model.model, 64) / 64)
    spec = spec_from_config(config.to_dict(), Where())
    assert memory.kept_bytes_per_token(spec, dtype) == pytest.approx(per_layer[1] - per_layer[0], rel=0.05)


def test_memory_follows_sharding_dtype_and_checkpointing() -> None:
    spec = load_model_spec("Qwen/Qwen3-8B", Where())
    wide = Layout(DeviceMesh(0, 8), dp=8, sharding="fsdp")
    half, full = ModelRole(dtype="bfloat16"), ModelRole(dtype="float32")
    assert memory.trained_copy(spec, half, LAYOUT).total == 18 * spec.n_params()  # 2 + 4 + 4 + 8 bytes
    assert memory.trained_copy(spec, full, LAYOUT).total == 16 * spec.n_params()  # 4 + 4 + 8
    assert memory.trained_copy(spec, half, wide).total == pytest.approx(20 * spec.n_params() / 8, rel=1e-6)
    assert memory.kv_bytes_per_token(spec, 2) == 2 * 36 * 8 * 128 * 2
    light = ModelRole(dtype="bfloat16", gradient_checkpointing=True)
    full_pass = memory.train_activations(spec, half, LAYOUT, 4096)
    assert memory.train_activations(spec, light, LAYOUT, 4096).activations < full_pass.activations / 5
    longer = memory.train_activations(spec, half, LAYOUT, 1 << 20)
    assert longer.logits == full_pass.logits  # chunked: no growth with the batch


def test_a_cached_snapshot_is_found_by_branch_and_by_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}))
    spec: ModelSpec = load_model_spec("some/model", Where(), tmp_path)
    assert spec.hidden == 64
    assert load_model_spec("some/model", Where(), tmp_path, "abc") == spec


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("Qwen/Qwen3-8b", "did you mean 'Qwen/Qwen3-8B'"),
        ("nobody/nothing-at-all", "hf download nobody/nothing-at-all"),
        ("./nowhere", "a model is a directory with a config.json"),
    ],
)
def test_an_unknown_model_is_refused_with_a_way_out(path: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_model_spec(path, Where("run.yaml", 3, "$.models.actor.path"), tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**BASE, "model_type": "t5"}, "supported: llama, qwen2"),
        ({"model_type": "llama", "hidden_size": 64}, "missing required field"),
        ({**BASE, "model_type": "llama", "hidden_size": -1}, "hidden_size"),
        ({**BASE, "model_type": "llama", "num_key_value_heads": 3}, "4 heads do not divide among 3"),
        ({**BASE, "model_type": "qwen3_moe", "num_experts_per_tok": 200}, "a token can't pass 200 of 128 experts"),
        ({**BASE, "model_type": "qwen3_moe", "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({**BASE, "model_type": "mixtral", "num_experts_per_tok": 9}, "a token can't pass 9 of 8 experts"),
    ],
)
def test_a_bad_config_is_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        load_model_spec(str(tmp_path), Where("run.yaml"))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_unreadable_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_spec(str(tmp_path), Where())


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2.5-1210", "Qwen/Qwen3-9B"])
def test_another_model_is_no_spelling(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_spec(name, Where(), tmp_path)
    assert "did you mean" not in str(caught.value) and f"hf download {name}" in str(caught.value)


def test_a_long_common_beginning_alone_is_no_slip() -> None:
    known = ["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "train_actor", "temperature"]
    assert "did you mean" not in suggest("deepseek-ai/DeepSeek-V2", known)
    assert suggest("temprature", known) == "did you mean 'temperature'?"
    assert suggest("train_actr", known) == "did you mean 'train_actor'?"
