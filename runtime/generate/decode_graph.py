"""One decode step of a model: eager anywhere, or replayed from CUDA graphs. Owns the static buffers of the graphs.

A graph holds addresses: it is dropped when the cache is reallocated or the weights move. Weights that change in place
need no new capture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realgraph.runtime.attention.kv_cache import DecodePass, KVCache

_WARMUP_STEPS = 2  # before capture: lets cuBLAS and the allocator settle, as torch.cuda.graph asks for
_SMALLEST_LENGTH = 64


def decode_logits(module: nn.Module, tokens: Tensor, positions: Tensor, rollout_pass: DecodePass) -> Tensor:
    """Logits [n, V] of the next token of each of the first n slots, whose newest tokens [n] stand at positions [n]."""
    logits: Tensor = module(
        input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, rollout_pass=rollout_pass
    ).logits
    return logits[:, -1]


def bucket(n: int, most: int) -> int:
    """The smallest power of two that is at least n, cut at `most`."""
    return min(1 << (n - 1).bit_length(), most)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [bucket] int64, on the device
    positions: Tensor  # [bucket] int64
    logits: Tensor  # [slots of the cache, V], the first `bucket` rows written


class DecodeGraphs:
    """Decode steps by (slots, length), both rounded up to powers of two; each captured when first needed.

    Rows beyond the live ones write to position 0 of their own dead slots and are cut off. All graphs share one memory
    pool and one buffer of logits: they run one after the other, and their result is used before the next runs.
    """

    def __init__(self, module: nn.Module, cache: KVCache) -> None:
        self._module = module
        self._cache = cache
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._epoch = cache.epoch
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None  # the handle's type has no public name
        self._logits: Tensor | None = None  # [slots of the cache, V]

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

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [n, V] after `tokens` at `positions` of slots 0 to n - 1; overwritten by the next call."""
        if self._epoch != self._cache.epoch:
            self.drop()
            self._epoch = self._cache.epoch
        n, length = len(tokens), max(positions) + 1
        key = bucket(n, self._cache.slots), bucket(max(length, _SMALLEST_LENGTH), self._cache.length)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        state = torch.tensor([tokens, positions], dtype=torch.int64)
        captured.tokens[:n] = state[0].to(captured.tokens.device, non_blocking=True)
        captured.positions[:n] = state[1].to(captured.tokens.device, non_blocking=True)
        captured.positions[n:] = 0
        captured.graph.replay()
        return captured.logits[:n]

    def _capture(self, slots: int, length: int) -> _Captured:
        """Record one step. Warm-up and capture write to position 0 of slots whose true keys must survive: it is put
        back afterwards."""
        device = self._cache.shape.device
        tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        positions = torch.zeros(slots, dtype=torch.int64, device=device)
        firsts = [layer[:, :slots, :, 0].clone() for layer in self._cache.layers]

        def step() -> Tensor:
            rollout_pass = DecodePass(self._cache, positions, ((0, slots, length),))
            return decode_logits(self._module, tokens, positions, rollout_pass)

        self._warm_up(step)
        logits = self._logits
        assert logits is not None
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread of the worker may copy tensors meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits[:slots] = step()
        except RuntimeError as error:
            raise RuntimeError(
                f"the decode step of {type(self._module).__name__} can't be captured as a CUDA graph"
                f" (switch it off by cuda_graphs=False): {error}"
            ) from error
        for layer, first in zip(self._cache.layers, firsts, strict=True):
            layer[:, :slots, :, 0] = first
        return _Captured(graph, tokens, positions, logits)

    def _warm_up(self, step: Callable[[], Tensor]) -> None:
        """Run `step` on a side stream, as capture does; make what the graphs share where it is missing."""
        device = self._cache.shape.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_STEPS - 1):
                step()
            logits = step()
        torch.cuda.current_stream(device).wait_stream(side)
        if self._logits is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._logits = logits.new_empty((self._cache.slots, logits.shape[-1]))
