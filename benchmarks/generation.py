"""Tokens per second of the embedded generation engine, `model.generate` and transformers' continuous batching.

All draw the same number of tokens for the same prompts, interleaved in one process on one core; run from the root of
the repository: `OMP_NUM_THREADS=1 python -m benchmarks.generation`. Lengths are log-normal and forced: no token stops
a sample. Each contender first shows its best batch size, then runs again with it, and counts by its best run. Then our
engine runs with a cache of a quarter of slots x longest: as places for whole samples, of which a quarter fits, and as
pages, of which sequences take what they have now.
Seconds are of CPU time, as one core of a busy machine is hard to time by the wall; only ratios carry over to other
machines. Our engine also returns log-probabilities and versions; the others are not asked for any.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.machine import describe
from realgraph.runtime.engine import Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch

ROUNDS = 1
LONGEST_TOKENS = 256
LONGEST_PROMPT = 20
PAGED_TARGET = 1.3  # of tokens per second in a cache of a quarter of slots x longest
RECORDED_TARGET = 0.97  # of the recorded ratio to transformers
PAD = 0
RESULTS = Path(__file__).parent / "results" / "generation.json"


@dataclass(frozen=True)
class Case:
    """A model size, its requests, and the batch sizes that each contender may choose from."""

    name: str
    shape: dict[str, Any]
    requests: int
    batches: dict[str, tuple[int, ...]]
    target: float


CASES = (
    Case(
        "0.8M",
        {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
        512,
        {"embedded": (64, 128), "generate": (16, 64), "continuous": (16, 64)},
        2.5,
    ),
    Case(
        "30M",
        {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "head_dim": 64}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        48,
        {"embedded": (16, 48), "generate": (16, 48), "continuous": (16, 48)},
        1.2,
    ),
)


def make_requests(n: int, vocabulary: int) -> list[Request]:
    """Log-normal lengths of mean 39, at most 256; prompts of 6 to 20 tokens."""
    rng = random.Random(0)
    sigma = 0.9
    made = []
    for i in range(n):
        length = int(rng.lognormvariate(math.log(40) - sigma**2 / 2, sigma))
        prompt = tuple(rng.randrange(1, vocabulary) for _ in range(rng.randint(6, LONGEST_PROMPT)))
        made.append(Request(i, prompt, max(1, min(LONGEST_TOKENS, length)), seed=i))
    return made


def embedded(model: Any, requests: Sequence[Request], batch: int, cache_tokens: int | None = None) -> float:
    """Seconds of this project's engine with at most `batch` sequences at once."""
    start = time.process_time()
    engine = ContinuousBatch(model, RolloutLimits(max_running=batch, max_cache_tokens=cache_tokens))
    engine.submit(requests)
    lengths = {}
    while not engine.idle:
        for completion in engine.step():
            lengths[completion.id] = len(completion.tokens)
    seconds = time.process_time() - start
    assert lengths == {r.id: r.max_new_tokens for r in requests}
    return seconds


class _OwnLength(StoppingCriteria):
    """Ends each row at its own length; generate ends a batch when all its rows have."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor([prompt + n for n in lengths])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: object) -> Any:
        return input_ids.shape[1] >= self._ends


def hf_generate(model: Any, requests: Sequence[Request], batch: int) -> float:
    """Seconds of `model.generate`, `batch` requests at a time in the order of arrival, prompts padded on the left."""
    start = time.process_time()
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        width = max(len(r.prompt) for r in part)
        ids = torch.tensor([[PAD] * (width - len(r.prompt)) + list(r.prompt) for r in part])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in part])
        lengths = [r.max_new_tokens for r in part]
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=PAD,
            stopping_criteria=StoppingCriteriaList([_OwnLength(width, lengths)]),
        )
        assert out.shape[1] == width + max(lengths)
    return time.process_time() - start


def hf_generate_sorted(model: Any, requests: Sequence[Request], batch: int) -> float:
    """The same with requests sorted by length beforehand: an oracle, as no real run knows lengths before sampling."""
    return hf_generate(model, sorted(requests, key=lambda r: -r.max_new_tokens), batch)


def hf_continuous(model: Any, requests: Sequence[Request], batch: int) -> float:
    """Seconds of transformers' continuous batching, from the first request to the last result; its setup is free."""
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LONGEST_TOKENS, eos_token_id=-1, pad_token_id=PAD, bos_token_id=1
    )
    page = 32
    blocks = batch * (LONGEST_TOKENS // page + 2)
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=max(256, 2 * batch), max_requests_per_batch=batch
    )
    lengths: dict[str, int] = {}
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching, timeout=5
    ) as manager:
        start = time.process_time()
        for request in requests:
            manager.add_request(list(request.prompt), str(request.id), request.max_new_tokens, eos_token_id=-1)
        while len(lengths) < len(requests):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"continuous batching stopped after {len(lengths)} of {len(requests)} requests")
            if result.is_finished():
                lengths[result.request_id] = len(result.generated_tokens)
        seconds = time.process_time() - start
    assert lengths == {str(r.id): r.max_new_tokens for r in requests}
    return seconds


CONTENDERS: dict[str, Callable[[Any, Sequence[Request], int], float]] = {
    "embedded": embedded,
    "generate": hf_generate,
    "continuous": hf_continuous,
}


def made(case: Case) -> Any:
    """The model of a case, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(**case.shape, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=None)
    return Qwen3ForCausalLM(config).eval()


def paged(model: Any, case: Case, requests: Sequence[Request]) -> dict[str, float]:
    """Tokens per second in a cache of a quarter of slots x longest: of places, of pages, and their ratio."""
    slots = max(case.batches["embedded"])
    cache = slots * (LONGEST_PROMPT + LONGEST_TOKENS) // 4
    tokens = sum(r.max_new_tokens for r in requests)
    runs = [(embedded(model, requests, slots // 4), embedded(model, requests, slots, cache)) for _ in range(ROUNDS + 1)]
    places, pages = (tokens / min(seconds) for seconds in zip(*runs, strict=True))
    print(f"{case.name:>5} cache of {cache:,} tokens: {places:,.0f} tok/s as places, {pages:,.0f} tok/s as pages")
    print(f"{case.name:>5} pages / places: {pages / places:.2f} (target {PAGED_TARGET})")
    return {"cache_tokens": cache, "places": places, "pages": pages, "ratio": pages / places, "target": PAGED_TARGET}


def measure(case: Case) -> dict[str, object]:
    """Tokens per second of each contender's best run, and the ratio to the better of transformers' two ways."""
    model = made(case)
    requests = make_requests(case.requests, case.shape["vocab_size"])
    tokens = sum(r.max_new_tokens for r in requests)
    for run in CONTENDERS.values():
        run(model, requests[:4], 4)  # imports and allocations
    rates: dict[str, dict[int, float]] = {}
    for name, run in CONTENDERS.items():
        rates[name] = {batch: tokens / run(model, requests, batch) for batch in case.batches[name]}
        print(f"{case.name:>5} {name:>16}: " + ", ".join(f"{r:,.0f} tok/s ({b})" for b, r in rates[name].items()))
    chosen = {name: max(by_batch, key=lambda batch: by_batch[batch]) for name, by_batch in rates.items()}
    runs: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, run in CONTENDERS.items():
            runs[name].append(tokens / run(model, requests, chosen[name]))
    oracle = tokens / hf_generate_sorted(model, requests, chosen["generate"])
    best = {name: max([*runs[name], rates[name][chosen[name]]]) for name in CONTENDERS}
    ratio = best["embedded"] / max(best["generate"], best["continuous"])
    print(f"{case.name:>5} best: " + ", ".join(f"{name} {rate:,.0f} tok/s" for name, rate in best.items()))
    print(f"{case.name:>5} generate with requests sorted by lengths known in advance: {oracle:,.0f} tok/s")
    print(f"{case.name:>5} embedded / better of generate and continuous batching: {ratio:.2f} (target {case.target})")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "requests": len(requests),
        "tokens": tokens,
        "mean_length": tokens / len(requests),
        "longest": max(r.max_new_tokens for r in requests),
        "batch": chosen,
        "tokens_per_second": best,
        "runs": runs,
        "ratio": ratio,
        "ratio_to_sorted_generate": best["embedded"] / oracle,
        "target": case.target,
        "paged": paged(model, case, requests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one; writes nothing")
    parser.add_argument("--paged", action="store_true", help="the paged cache alone; writes nothing")
    given = parser.parse_args()
    only = given.case
    torch.set_num_threads(1)
    if given.paged:
        for case in CASES:
            if only in (None, case.name):
                paged(made(case), case, make_requests(case.requests, case.shape["vocab_size"]))
        return
    measured = {case.name: measure(case) for case in CASES if only in (None, case.name)}
    if only is None:
        recorded = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
        for name, found in measured.items():
            if name in recorded:
                kept = float(str(found["ratio"])) / recorded[name]["ratio"]
                verdict = "PASS" if kept >= RECORDED_TARGET else "FAIL"
                print(f"{verdict} {name}: {kept:.3f} x the ratio on record (at least {RECORDED_TARGET})")
                found["over_recorded"] = {"ratio": kept, "target": RECORDED_TARGET}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": describe(), "cases": measured}, indent=2) + "\n")


if __name__ == "__main__":
    main()
