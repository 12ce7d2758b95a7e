"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1), in place of transformers' own. Knows no page.

Training, and a prompt's first pass, expand the latents of their rows into keys and values of every head. Generation
caches of each token its latent and the one rotary key, which all heads share: queries go through the keys' projection,
outputs through the values', so that attention reads the cache as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from realgraph.runtime.attention.attention import packed_attention
from realgraph.runtime.attention.passes import Head, RolloutPass


class MultiHeadLatentAttention(nn.Module):
    """The attention of one layer; the projections are those of the module that it stands for. Tensor parallelism leaves
    it some of the heads: `q_b_proj` (or `q_proj`), `kv_b_proj` and `o_proj` are cut, the others whole."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        for name, module in plain.named_children():
            self.add_module(name, module)
        self.layer_idx: int = plain.layer_idx
        self.scaling: float = plain.scaling
        self._rank, self._rope = plain.kv_lora_rank, plain.qk_rope_head_dim
        self._key, self._value = plain.qk_nope_head_dim, plain.v_head_dim  # of a head, without its rotary part
        self._turn = apply_rotary_pos_emb_interleave if plain.config.rope_interleave else apply_rotary_pos_emb

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Numbers that a cache keeps of a token, and how many of them, from the first on, are values, too."""
        return self._rank + self._rope, self._rank

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """[n, q, hidden] -> [n, q, hidden], by the `rollout_pass` or the `segments` that are given."""
        rows = hidden_states.shape[:-1]
        query = self._queries(hidden_states).view(*rows, -1, self._key + self._rope).transpose(1, 2)
        still, turned = torch.split(query, [self._key, self._rope], -1)
        latent, key = torch.split(self.get_submodule("kv_a_proj_with_mqa")(hidden_states), [self._rank, self._rope], -1)
        latent = self.get_submodule("kv_a_layernorm")(latent)
        turned, key = self._turn(turned, key[:, None], *position_embeddings)
        rollout_pass = given.get("rollout_pass")
        if rollout_pass is None:
            options = {"segments": given["segments"], "scaling": self.scaling}
            out, _ = packed_attention(self, *self._expanded((still, turned), latent, key), None, **options)
        else:
            out = self._cached((still, turned), latent, key, rollout_pass)
        return self.get_submodule("o_proj")(out.reshape(*rows, -1)), None

    def _queries(self, hidden_states: Tensor) -> Tensor:
        parts = dict(self.named_children())
        if "q_proj" in parts:
            out: Tensor = parts["q_proj"](hidden_states)
        else:
            out = parts["q_b_proj"](parts["q_a_layernorm"](parts["q_a_proj"](hidden_states)))
        return out

    def _expanded(self, query: tuple[Tensor, Tensor], latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, heads, q, key + rope or value]. query: [n, heads, q, key] and [n, heads, q,
        rope]; latent: [n, q, rank]; key: [n, 1, q, rope]."""
        both = self.get_submodule("kv_b_proj")(latent).unflatten(-1, (-1, self._key + self._value)).transpose(1, 2)
        keys, values = torch.split(both, [self._key, self._value], -1)
        keys = torch.cat([keys, key.expand(-1, keys.shape[1], -1, -1)], -1)
        return torch.cat(query, -1), keys, values

    def _cached(self, query: tuple[Tensor, Tensor], latent: Tensor, key: Tensor, rollout_pass: RolloutPass) -> Tensor:
        """[n, q, heads, value]. query, latent, key: see `_expanded`. Kernels know expanded heads alone, which cost less
        where nothing is read back."""
        cached, head = torch.cat([latent[:, None], key], -1), Head(self.scaling, None, None)
        if rollout_pass.fresh:
            return rollout_pass.attend(self.layer_idx, self._expanded(query, latent, key), head, cached)
        weight = self.get_parameter("kv_b_proj.weight").view(-1, self._key + self._value, self._rank)
        to_keys, to_values = torch.split(weight, [self._key, self._value], 1)
        queries = torch.cat([torch.einsum("nhqk,hkr->nhqr", query[0], to_keys), query[1]], -1)
        out = rollout_pass.attend(self.layer_idx, (queries, cached, cached[..., : self._rank]), head)
        return torch.einsum("nqhr,hvr->nqhv", out, to_values)


def put_latent_attention(network: Any) -> None:
    """Put MultiHeadLatentAttention in place of transformers' own, in place; of any other network nothing changes."""
    for layer in network.model.layers:
        if isinstance(layer.self_attn, DeepseekV3Attention):
            layer.self_attn = MultiHeadLatentAttention(layer.self_attn)
