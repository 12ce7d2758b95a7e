"""Small models, random requests and exact expectations for tests of the generation engine."""

import copy
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from realgraph.runtime.attention.latent import put_latent_attention
from realgraph.runtime.engine import Completion, Request, RolloutEngine
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from tests import tiny

ARCHITECTURES = (*tiny.KINDS, "qwen2_sliding")
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def model(name: str, seed: int = 0) -> Any:
    """Three layers, of both sorts where the architecture has a sliding window; never stops by itself."""
    changes: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": None}
    if name == "qwen2_sliding":
        changes |= {"use_sliding_window": True, "sliding_window": 7}
    if name in ("gemma2", "gemma3_text", "qwen2_sliding"):
        changes["layer_types"] = LAYERS
    return tiny.network(name.removesuffix("_sliding"), seed, **changes)


def served(module: Any) -> Any:
    """The module as engines build it: latent attention is their own, over a cache that transformers' can't read."""
    if module.config.model_type != "deepseek_v3":
        return module
    own = copy.deepcopy(module)
    put_latent_attention(own)
    return own


def requests(rng: random.Random, n: int, longest: int = 40, groups_of: int = 1) -> list[Request]:
    """n requests in groups with one prompt each; lengths, prompts and temperatures mixed."""
    made: list[Request] = []
    prompt: tuple[int, ...] = ()
    for i in range(n):
        if i % groups_of == 0:
            prompt = tuple(rng.randrange(1, tiny.VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 23, 40])))
        made.append(Request(i, prompt, rng.randint(1, longest), seed=rng.randrange(2**40)))
    return made


def run(engine: ContinuousBatch, wanted: Iterable[Request], most: int = 2000) -> dict[int, Completion]:
    engine.submit(list(wanted))
    done: dict[int, Completion] = {}
    for _ in range(most):
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
        if engine.idle:
            return done
    raise AssertionError("the engine never came to rest")


def full_logprobs(module: Any, request: Request, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [new tokens] of a plain forward over the whole sequence, at the request's temperature."""
    ids = torch.tensor([[*request.prompt, *tokens]])
    with torch.no_grad():
        logits = module(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    scaled = (logits.double() / (request.temperature or 1.0)).log_softmax(-1)
    return scaled.gather(-1, ids[0, len(request.prompt) :, None])[:, 0]


def assert_exact(module: Any, request: Request, completion: Completion, within: float = 1e-4) -> None:
    expected = full_logprobs(module, request, completion.tokens)
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < within


def kept_logprobs(modules: Sequence[Any], request: Request, completion: Completion) -> Tensor:
    """Log-probabilities [new tokens] where `modules[version]` went on over the keys that those before it had stored.

    Of each version's tokens all but the newest had been read when the next one came.
    """
    from transformers import DynamicCache

    ids, cache, read = torch.tensor([[*request.prompt, *completion.tokens]]), DynamicCache(), 0
    logits = []
    for version in sorted(set(completion.versions)):
        drawn = sum(one <= version for one in completion.versions)
        end = len(request.prompt) + drawn - 1
        with torch.no_grad():
            logits.append(modules[version](input_ids=ids[:, read:end], past_key_values=cache, use_cache=True).logits[0])
        read = end
    scaled = (torch.cat(logits)[len(request.prompt) - 1 :].double() / (request.temperature or 1.0)).log_softmax(-1)
    return scaled.gather(-1, ids[0, len(request.prompt) :, None])[:, 0]


def drained(engine: RolloutEngine, n: int, seconds: float = 120.0) -> dict[int, Completion]:
    """The next n samples of the stream, by id."""
    done: dict[int, Completion] = {}
    deadline = time.monotonic() + seconds
    while len(done) < n:
        assert time.monotonic() < deadline
        for completion in engine.take(1.0):
            assert completion.id not in done
            done[completion.id] = completion
    return done
