"""`realgraph generate`: a trained model's answers to some prompts, in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from realgraph.eval_command import model_folder
from realgraph.graphs.spec import ModelRole


class Ask(NamedTuple):
    """How to sample. temperature 0 is greedy; `chat` wraps prompts in the model's chat template, where it has one."""

    temperature: float = 0.0
    max_new_tokens: int = 256
    n: int = 1
    seed: int = 0
    chat: bool = True


def generate_command(model: Path, prompts: Sequence[str], ask: Ask) -> None:
    """Print each prompt with its samples. Raises ConfigError where no model lies at `model`."""
    for prompt, text in answers(model_folder(model), prompts, ask):
        print(f"{prompt}{text}" if len(prompts) * ask.n == 1 else f"{prompt!r} -> {text!r}")
        sys.stdout.flush()


def answers(folder: Path, prompts: Sequence[str], ask: Ask) -> list[tuple[str, str]]:
    """(prompt, text) for every sample, in the order of the prompts."""
    import torch

    from realgraph.runtime.engine import Request
    from realgraph.runtime.generation import TorchRolloutEngine
    from realgraph.runtime.loading import stop_tokens
    from realgraph.runtime.models import Start, build
    from realgraph.runtime.resources import pick_device
    from realgraph.runtime.rollouts import sample_seed
    from realgraph.runtime.tokenize import load_tokenizer, prompt_tokens

    tokenizer = load_tokenizer(str(folder))
    device = pick_device(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = build(ModelRole(), str(folder), Start(device, dtype)).network
    engine = TorchRolloutEngine(network)
    stops = stop_tokens(tokenizer, network)
    chat = ask.chat and bool(tokenizer.chat_template)
    asked = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    cut = [tuple(prompt_tokens(prompt, tokenizer)) for prompt in asked]
    positions = int(network.config.max_position_embeddings)
    requests = [
        Request(
            id=index,
            prompt=cut[index // ask.n],
            max_new_tokens=max(1, min(ask.max_new_tokens, positions - len(cut[index // ask.n]))),
            seed=sample_seed(ask.seed, index),
            temperature=ask.temperature,
            stop_tokens=stops,
        )
        for index in range(len(prompts) * ask.n)
    ]
    engine.submit(requests)
    texts: dict[int, str] = {}
    while not engine.idle:
        for done in engine.step():
            texts[done.id] = tokenizer.decode(done.tokens, skip_special_tokens=True)
    return [(prompts[index // ask.n], text) for index, text in sorted(texts.items())]
