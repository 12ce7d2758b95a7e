"""One decode step of a model: eager anywhere, or replayed from CUDA graphs. Owns the static buffers of the graphs.

A graph holds addresses: it is dropped when the cache is reallocated or the weights move. Weights that change in place
need no new capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from realgraph.runtime.attention.kv_cache import KVCache
from realgraph.runtime.attention.paged import reads_pages
from realgraph.runtime.attention.pages import PAGE_TOKENS
from realgraph.runtime.attention.passes import DecodePass

_WARMUP_STEPS = 2  # before the first capture: lets cuBLAS and the allocator settle, as torch.cuda.graph asks for
_SMALLEST_LENGTH = 64


def decode_logits(module: nn.Module, tokens: Tensor, positions: Tensor, rollout_pass: DecodePass) -> Tensor:
    """Logits [n, V] of the next token of each of the first n slots, whose newest tokens [n] stand at positions [n]."""
    logits: Tensor = module(
        input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, rollout_pass=rollout_pass
    ).logits
    return logits[:, -1]


def bucket(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def coarse_bucket(n: int) -> int:
    """The smallest power of four that is at least n."""
    return 1 << ((n - 1).bit_length() + 1) // 2 * 2


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    state: Tensor  # [bucket, 2 + pages] int64, on the device: token, position and pages of each sequence
    logits: Tensor  # [at least bucket, V], the first `bucket` rows written


Runs = Callable[[int, int], list[tuple[int, int, int]]]


class DecodeGraphs:
    """Decode steps by (sequences, length), both rounded up to powers of two; each captured when first needed. Where a
    kernel reads each sequence to its own end, lengths count for the pages alone, and are rounded up to powers of four.

    Rows beyond the live ones have position 0 of page 0, the cache's bin, and are cut off. All graphs share one memory
    pool, and those of about one size a buffer of logits: they run one after the other, and their result is used before
    the next runs. runs: the segments of a step of so many sequences, all read to one length.
    """

    def __init__(self, module: nn.Module, cache: KVCache, runs: Runs) -> None:
        self._module = module
        self._cache = cache
        self._runs = runs
        self._length_of = coarse_bucket if reads_pages(cache.shape) else bucket
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._epoch = cache.epoch
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None  # the handle's type has no public name
        self._logits: Tensor | None = None  # of the largest step so far

    def drop(self) -> None:
        """Forget every graph."""
        self._captured.clear()
        self._pool = self._logits = None

    def weights_changed(self) -> None:
        """Drop the graphs if a weight has moved; a change in place keeps them."""
        addresses = tuple(parameter.data_ptr() for parameter in self._module.parameters())
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses

    def logits(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], tables: NDArray[np.int64]) -> Tensor:
        """Logits [n, V] after `tokens` at `positions` of n sequences with pages `tables` [n, m]; overwritten by the
        next call."""
        if self._epoch != self._cache.epoch:
            self.drop()
            self._epoch = self._cache.epoch
        n, length = len(tokens), int(positions.max()) + 1
        key = bucket(n), self._length_of(max(length, _SMALLEST_LENGTH))
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        state = np.zeros(captured.state.shape, np.int64)
        width = min(tables.shape[1], key[1] // PAGE_TOKENS)
        state[:n, 0], state[:n, 1], state[:n, 2 : 2 + width] = tokens, positions, tables[:, :width]
        captured.state.copy_(torch.from_numpy(state), non_blocking=True)
        captured.graph.replay()
        return captured.logits[:n]

    def _capture(self, rows: int, length: int) -> _Captured:
        """Record one step. Warm-up and capture write to the cache's bin."""
        state = torch.zeros(rows, 2 + length // PAGE_TOKENS, dtype=torch.int64, device=self._cache.shape.device)

        def step() -> Tensor:
            rollout_pass = DecodePass(self._cache, state[:, 2:], state[:, 1], self._runs(rows, length))
            return decode_logits(self._module, state[:, 0], state[:, 1], rollout_pass)

        self._warm_up(step)
        logits = self._logits
        assert logits is not None
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread of the worker may copy tensors meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits[:rows] = step()
        except RuntimeError as error:
            raise RuntimeError(
                f"the decode step of {type(self._module).__name__} can't be captured as a CUDA graph"
                f" (switch it off by cuda_graphs=False): {error}"
            ) from error
        return _Captured(graph, state, logits)

    def _warm_up(self, step: Callable[[], Tensor]) -> None:
        """Run `step` on a side stream, as capture does; make what the graphs share where it is missing or too small."""
        device = self._cache.shape.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_STEPS - 1 if self._pool is None else 0):
                step()
            logits = step()
        torch.cuda.current_stream(device).wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)
