"""Cuts of tensors: over any layout the boxes cover each tensor, once per intended copy, and agree with one another."""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from realgraph.graphs.errors import Where
from realgraph.planner.inputs.model_spec import Head, ModelSpec, spec_from_config
from realgraph.runtime.models.heads import network_class, prepare
from realgraph.runtime.parallel.cuts import Box, Shard, cut, split

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "qwen3_moe": {"moe_intermediate_size": 7, "num_experts_per_tok": 1, "mlp_only_layers": [1]},
    "mixtral": {"num_experts_per_tok": 1},
    "gpt_oss": {"num_experts_per_tok": 1},
    "deepseek_v3": {
        **{"num_experts_per_tok": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 7, "attention_bias": True},
        **{"q_lora_rank": 3, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 2},
    },
}
Shape = tuple[tuple[str, int], ...]


@cache
def tensors(kind: str, head: Head, shape: Shape) -> tuple[ModelSpec, dict[str, tuple[int, ...]]]:
    """A model and its parameters' names and shapes, as transformers writes them to a checkpoint."""
    config = AutoConfig.for_model(kind, **{"pad_token_id": 0, **KINDS[kind], **dict(shape)})
    prepare(config, head)
    with torch.device("meta"):
        network = network_class(config, head)._from_config(config)
    network.tie_weights()
    named = revert_weight_conversion(network, dict(network.named_parameters()))
    return spec_from_config(config.to_dict(), Where()), {name: tuple(each.shape) for name, each in named.items()}


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, Head, dict[str, tuple[int, ...]]]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    shape = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([2, 4])),
        "vocab_size": draw(st.sampled_from([7, 12])),
        "intermediate_size": draw(st.sampled_from([5, 8])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_experts" if kind == "qwen3_moe" else "num_local_experts": draw(st.sampled_from([2, 4, 6])),
    }
    shape["hidden_size"] = shape["num_attention_heads"] * (2 if kind == "qwen2" else 1)  # Qwen2 has no head_dim
    head: Head = draw(st.sampled_from(("lm", "lm", "value", "score")))
    return (lambda found: (found[0], head, found[1]))(tensors(kind, head, tuple(shape.items())))


@st.composite
def layouts(draw: st.DrawFn, model: ModelSpec) -> tuple[int, int, int, int, tuple[Shard, ...]]:
    """tp, pp, ep, dp and the place of each device; layers go to stages at random, in one run or in chunks."""
    fitting = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    tp = draw(st.sampled_from([n for n in fitting if n % model.kv_heads == 0 or model.kv_heads % n == 0]))
    pp, dp = draw(st.integers(1, model.layers)), draw(st.integers(1, 4))
    spread = [n for n in range(1, model.experts + 1) if model.experts % n == 0 and tp * dp % n == 0]
    ep = draw(st.sampled_from(spread or [1]))
    stage_of = draw(st.permutations([*range(pp), *(draw(st.integers(0, pp - 1)) for _ in range(model.layers - pp))]))
    shards = tuple(
        Shard(
            layers=tuple(layer for layer in range(model.layers) if stage_of[layer] == stage),
            first=stage == 0,
            last=stage == pp - 1,
            tp_rank=rank % tp,
            tp=tp,
            ep_rank=rank % ep,
            ep=ep,
        )
        for stage in range(pp)
        for rank in range(tp * dp)
    )
    return tp, pp, ep, dp, shards


def intended_copies(model: ModelSpec, head: Head, name: str, ranks: tuple[int, int, int, int]) -> int:
    """Devices that hold any one element of a tensor."""
    tp, pp, ep, dp = ranks
    if "embed_tokens" in name:
        return dp * (2 if pp > 1 and model.tied and head == "lm" else 1)
    if ".experts." in name:
        if ep > 1:
            return dp * tp // ep
        return dp * tp if name.endswith("down_proj_bias") else dp
    if re.search(r"norm|_a_proj|\.gate\.|\.router\.|score|(o|down)_proj\.bias", name):
        return dp * tp
    if re.search(r"[kv]_proj", name):
        return dp * max(1, tp // model.kv_heads)
    return dp


@given(st.data())
@settings(max_examples=150)
def test_the_boxes_cover_each_tensor_once_per_intended_copy(data: st.DataObject) -> None:
    model, head, shapes = data.draw(models())
    *ranks, shards = data.draw(layouts(model))
    tp, pp, ep, dp = ranks
    for name, shape in shapes.items():
        held = np.zeros(shape, dtype=np.int64)
        for shard in shards:
            box = cut(model, head, name, shape, shard)
            if box is not None:
                assert all(a >= 0 and n > 0 and a + n <= whole for a, n, whole in zip(*box, shape, strict=True)), name
                held[box.slices] += 1
        copies = intended_copies(model, head, name, (tp, pp, ep, dp))
        assert (held == copies).all(), f"{name}: {held.min()} to {held.max()} copies, not {copies}"


@given(st.data())
@settings(max_examples=100)
def test_what_a_rank_holds_of_a_layer_computes_together(data: st.DataObject) -> None:
    """Query heads find their KV heads, columns of o_proj and down_proj the rows before them, whole heads all along."""
    model, head, shapes = data.draw(models())
    shard = data.draw(st.sampled_from(data.draw(layouts(model))[-1]))
    group = model.heads // model.kv_heads

    def rows(name: str, dim: int = 0) -> range | None:
        box = cut(model, head, name, shapes[name], shard) if name in shapes else None
        return None if box is None else range(box.start[dim], box.start[dim] + box.shape[dim])

    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        if model.latent is not None:
            key, value = model.head_dim + model.latent.rope_dim, model.head_dim + model.latent.value_dim
            attention = {"q_b": (key, 0), "kv_b": (value, 0), "o": (model.latent.value_dim, 1)}
            cuts = [
                (rows(f"{prefix}self_attn.{part}_proj.weight", dim), width) for part, (width, dim) in attention.items()
            ]
            heads = {found and (found.start / width, found.stop / width) for found, width in cuts}
            assert len(heads) == 1 and (heads == {None}) == (layer not in shard.layers)
            continue
        queries, keys, values = (rows(f"{prefix}self_attn.{kind}_proj.weight") for kind in "qkv")
        assert (queries is None) == (layer not in shard.layers)
        assert rows(f"{prefix}self_attn.o_proj.weight", 1) == queries and keys == values
        if queries is not None and keys is not None:
            assert queries.start % model.head_dim == len(queries) % model.head_dim == 0
            assert sorted({row // model.head_dim // group for row in queries}) == sorted(
                {row // model.head_dim for row in keys}
            )
            assert len(keys) % model.head_dim == 0
        for mlp in {name.rsplit(".", 2)[0] for name in shapes if name.startswith(prefix) and "down_proj" in name}:
            assert (
                rows(f"{mlp}.gate_proj.weight") == rows(f"{mlp}.up_proj.weight") == rows(f"{mlp}.down_proj.weight", 1)
            )
        for expert in {name.rsplit(".", 2)[0] for name in shapes if name.startswith(prefix) and ".w2." in name}:
            assert rows(f"{expert}.w1.weight") == rows(f"{expert}.w3.weight") == rows(f"{expert}.w2.weight", 1)
        if (pair := rows(f"{prefix}mlp.experts.gate_up_proj", 2)) is not None:
            assert pair == rows(f"{prefix}mlp.experts.gate_up_proj_bias", 1)
            width = rows(f"{prefix}mlp.experts.down_proj", 1)
            assert width is not None and (pair.start, pair.stop) == (2 * width.start, 2 * width.stop)
        sinks = f"{prefix}self_attn.sinks"
        with_sinks = queries and range(queries.start // model.head_dim, queries.stop // model.head_dim)
        assert sinks not in shapes or rows(sinks) == with_sinks
        for name in shapes:  # a bias lies with its rows; whole behind a sum over ranks, of which one may have no part
            if name.startswith(prefix) and name.endswith(".bias"):
                summed = layer in shard.layers and name.split(".")[-2] in ("o_proj", "down_proj")
                of = range(shapes[name][0]) if summed else rows(name.removesuffix("bias") + "weight")
                assert rows(name) == of, name


@given(st.integers(0, 40), st.integers(1, 12))
def test_a_split_is_balanced_in_order_and_whole(n: int, ranks: int) -> None:
    parts = [split(n, ranks, rank) for rank in range(ranks)]
    assert [row for start, size in parts for row in range(start, start + size)] == list(range(n))
    sizes = [size for _, size in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_a_shared_expert_is_cut_like_an_mlp_whatever_ep_is() -> None:
    model, _ = tensors("mixtral", "lm", SMALL)
    shard = Shard((0, 1), tp_rank=1, tp=2, ep_rank=1, ep=2)
    name = "model.layers.0.mlp.shared_expert"
    assert cut(model, "lm", f"{name}.up_proj.weight", (5, 8), shard) == Box((3, 0), (2, 8))
    assert cut(model, "lm", f"{name}.down_proj.weight", (8, 5), shard) == Box((0, 3), (8, 2))
    assert cut(model, "lm", f"{name}_gate.weight", (1, 8), shard) == Box((0, 0), (1, 8))


SMALL: Shape = (
    *(("num_key_value_heads", 2), ("num_attention_heads", 4), ("head_dim", 2), ("vocab_size", 7)),
    *(("intermediate_size", 5), ("num_hidden_layers", 2), ("hidden_size", 8), ("num_local_experts", 4)),
)
BOTH = (0, 1)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("kind", "head", "name", "shard", "says"),
    [
        ("llama", "lm", "model.layers.0.self_attn.x_proj.weight", Shard(BOTH), "'model.layers.0.self_attn.x_proj.weig"),
        ("llama", "lm", "model.layers.2.input_layernorm.weight", Shard(BOTH), "layers.2.* with 2 layers"),
        ("llama", "lm", "score.weight", Shard(BOTH), "'score.weight' under the head 'lm'"),
        ("llama", "value", "lm_head.weight", Shard(BOTH), "'lm_head.weight' under the head 'value'"),
        ("qwen3", "lm", "lm_head.weight", Shard(BOTH), "'lm_head.weight'"),
        ("mixtral", "lm", "model.layers.0.block_sparse_moe.experts.4.w1.weight", Shard(BOTH), "experts.4.w1"),
        ("llama", "lm", "model.layers.0.mlp.experts.0.up_proj.weight", Shard(BOTH), "experts.0.up_proj"),
        ("llama", "lm", Q_PROJ, Shard(BOTH, tp=3), "tp 3 does not divide 4 attention heads"),
        ("llama", "lm", Q_PROJ, Shard(BOTH, ep=2), "the model has none"),
        ("mixtral", "lm", Q_PROJ, Shard(BOTH, ep=3), "ep 3 does not divide 4 experts"),
        ("llama", "lm", Q_PROJ, Shard(()), "a stage without layers"),
    ],
)
def test_what_can_not_be_cut_is_refused_with_the_reason(
    kind: str, head: Head, name: str, shard: Shard, says: str
) -> None:
    model, _ = tensors(kind, "lm", SMALL)
    with pytest.raises(ValueError, match=says):
        cut(model, head, name, (8, 8), shard)


def test_boxes_intersect_and_move() -> None:
    one, other = Box((2, 0), (3, 4)), Box((4, 1), (5, 2))
    assert one.intersect(other) == other.intersect(one) == Box((4, 1), (1, 2))
    assert one.intersect(Box((5, 0), (1, 4))) is None
    assert Box((4, 1), (1, 2)).within(one) == Box((2, 1), (1, 2))
    assert one.numel == 12
