"""The network that a role's head needs, and its name on disk. Knows transformers' classes, no file and no engine.

Convention: a value or a score head is `score`, one bias-free linear layer hidden -> 1 on the final hidden state, as in
transformers' `<Model>ForSequenceClassification` with one label: AutoModelForSequenceClassification reads a saved critic
or reward model back, and reward models of the Hub load. A checkpoint that has no such head gets one of zeros: a critic
begins by predicting 0 everywhere.
"""

from typing import Any, Literal

Head = Literal["lm", "value", "score"]

HEAD = "score.weight"
CLASSIFIER = "ForSequenceClassification"  # at the end of the names of transformers' classes that have it
ALIASES = {"value_head.weight": HEAD, "v_head.summary.weight": HEAD}  # of other frameworks' critics
SUPPORTED = {
    "llama": "Llama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
}


def without_head(head: Head) -> tuple[str, str]:
    """The message about weights that lack the head of a role that never learns one, and its hint."""
    hint = "take a model that was trained with one (AutoModelForSequenceClassification saves it)"
    return f"have no {head} head, and this role never learns one", hint


def network_class(config: Any, head: Head) -> Any:
    """transformers' class of a supported configuration under this head."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # slow to import

    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    return auto._model_mapping[type(config)]


def prepare(config: Any, head: Head) -> None:
    """Set what the saved config.json has to say about the head."""
    config.architectures = [network_class(config, head).__name__]
    if head != "lm":
        config.num_labels = 1


def parameter_name(stored: str, head: Head, tied: bool) -> str | None:
    """The network's parameter that a checkpoint's tensor `stored` belongs to; None where this head leaves it aside.

    Checkpoints of a bare backbone lack the prefix `model.`; old ones hold the rotary buffer; tied ones may repeat the
    embedding as lm_head.
    """
    name = ALIASES.get(stored, stored)
    if name.endswith(("rotary_emb.inv_freq", ".masked_bias")) or name == "v_head.summary.bias":
        return None
    if name == "lm_head.weight":
        return name if head == "lm" and not tied else None
    if name in (HEAD, "score.bias"):
        return None if head == "lm" else name
    return name if name.startswith("model.") else f"model.{name}"
