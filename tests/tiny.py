"""Tiny models and packed batches for tests: seconds-long, no tokenizer, the same for the same seed."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from realgraph.runtime.batch import Packed

VOCABULARY = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # far from uniform: differences show
}


def config(kind: str = "qwen3", **changes: Any) -> Any:
    """A tiny configuration of a supported model type; Mistral, gpt-oss and Gemma 2 and 3 with a sliding window of 5."""
    shape = {**_SHAPE, **changes}
    match kind:
        case "llama":
            return LlamaConfig(**{"tie_word_embeddings": False, **shape})
        case "qwen2":
            return Qwen2Config(**{"tie_word_embeddings": True, **shape})
        case "qwen3":
            return Qwen3Config(**{"tie_word_embeddings": True, "head_dim": 16, **shape})
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
            return Qwen3MoeConfig(**{"tie_word_embeddings": False, "head_dim": 16, **experts, **shape})
        case "mixtral":
            return MixtralConfig(**{"num_local_experts": 4, "sliding_window": 5, "head_dim": 8, **shape})
        case "gpt_oss":
            shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.0, **shape}
            yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 128}
            return GptOssConfig(**{"head_dim": 16, "sliding_window": 5, "rope_parameters": yarn, **shape})
        case "deepseek_v3":
            latent = {"q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6}
            latent |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "first_k_dense_replace": 1}
            routed = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
            groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
            return DeepseekV3Config(**{**latent, **routed, **groups, **shape, "num_key_value_heads": 4})
        case "mistral":
            return MistralConfig(**{"sliding_window": 5, "head_dim": 8, **shape})
        case "gemma":
            return GemmaConfig(**{"head_dim": 8, **shape})
        case "gemma2":
            softcaps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
            return Gemma2Config(**{"head_dim": 8, "sliding_window": 5, **softcaps, **shape})
        case "gemma3_text":
            return Gemma3TextConfig(**{"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, **shape})
        case _:
            raise ValueError(f"no tiny {kind!r}")


MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
KINDS = ("llama", "qwen2", "qwen3", "mistral", *MIXTURES, "gemma", "gemma2", "gemma3_text")


def network(kind: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """transformers' own causal language model with seeded random weights (norms and biases random too), float32."""
    settings = config(kind, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
    return model.eval()


def save(folder: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A tiny model in a folder, as transformers writes it."""
    network(kind, seed, **changes).save_pretrained(folder)
    return folder


def batch(lengths: list[int], seed: int = 0, group_size: int = 2, dtype: torch.dtype = torch.float32) -> Packed:
    """Random samples of these lengths; the first third of each (at least one token) is prompt. Keys for RL losses."""
    rng = random.Random(seed)
    draw = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = torch.cat([torch.arange(length) >= max(1, length // 3) for length in lengths] or [torch.zeros(0).bool()])
    rewards = torch.tensor([rng.gauss(0, 1) for _ in lengths], dtype=dtype)
    return Packed(
        tokens=torch.randint(3, VOCABULARY, (n,), generator=draw),
        lengths=tuple(lengths),
        mask=mask,
        samples=tuple(range(len(lengths))),
        groups=tuple(i // group_size for i in range(len(lengths))),
        token_keys={
            "behaviour_logprobs": -3 - torch.rand(n, generator=draw, dtype=torch.float64).to(dtype),
            "ref_logprobs": -3 - torch.rand(n, generator=draw, dtype=torch.float64).to(dtype),
            "values": torch.randn(n, generator=draw, dtype=torch.float64).to(dtype),
            "returns": torch.randn(n, generator=draw, dtype=torch.float64).to(dtype),
            "advantages": torch.repeat_interleave(rewards, torch.tensor(lengths, dtype=torch.int64))
            + 0.1 * torch.randn(n, generator=draw, dtype=torch.float64).to(dtype),
            "versions": torch.zeros(n, dtype=torch.int32),
        },
        sample_keys={"reward": rewards},
    )


def lengths(n: int, longest: int, seed: int) -> list[int]:
    """n long-tailed lengths from 2 to `longest`."""
    rng = random.Random(seed)
    return [min(longest, max(2, int(rng.lognormvariate(2.0, 0.8)))) for _ in range(n)]
