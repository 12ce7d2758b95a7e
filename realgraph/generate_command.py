"""`realgraph generate`: a trained model's answers to some prompts, in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realgraph.cli import Ask
from realgraph.eval_command import model_folder
from realgraph.graphs.spec import ModelRole


def generate_command(model: Path, prompts: Sequence[str], ask: Ask) -> None:
    """Print each prompt with its samples. Raises ConfigError where no model lies at `model`."""
    for prompt, text in answers(model_folder(model), prompts, ask):
        print(f"{prompt}{text}" if len(prompts) * ask.n == 1 else f"{prompt!r} -> {text!r}")
        sys.stdout.flush()


def answers(folder: Path, prompts: Sequence[str], ask: Ask) -> list[tuple[str, str]]:
    """(prompt, text) for every sample, in the order of the prompts."""
    import torch
    from transformers import AutoTokenizer

    from realgraph.runtime.engine import Request
    from realgraph.runtime.generation import TorchRolloutEngine
    from realgraph.runtime.loading import stop_tokens
    from realgraph.runtime.models import Start, build
    from realgraph.runtime.resources import pick_device
    from realgraph.runtime.rollouts import sample_seed

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    device = pick_device(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = build(ModelRole(), str(folder), Start(device, dtype)).network
    engine = TorchRolloutEngine(network)
    stops = stop_tokens(tokenizer, network)
    requests = [
        Request(
            id=index,
            prompt=tuple(prompt_tokens(tokenizer, prompt, ask.chat)),
            max_new_tokens=min(ask.max_new_tokens, longest(network, tokenizer, prompt, ask.chat)),
            seed=sample_seed(ask.seed, index),
            temperature=ask.temperature,
            stop_tokens=stops,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(ask.n))
    ]
    engine.submit(requests)
    texts: dict[int, str] = {}
    while not engine.idle:
        for done in engine.step():
            texts[done.id] = tokenizer.decode(done.tokens, skip_special_tokens=True)
    return [(prompts[index // ask.n], text) for index, text in sorted(texts.items())]


def prompt_tokens(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """A prompt as the model was trained to see it."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(found["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def longest(network: Any, tokenizer: Any, prompt: str, chat: bool) -> int:
    """New tokens for which the model still has positions; at least one."""
    return max(1, int(network.config.max_position_embeddings) - len(prompt_tokens(tokenizer, prompt, chat)))
