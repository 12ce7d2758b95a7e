"""A transformers causal language model over a key-value cache: forward passes by slot. Knows no request.

The module may belong to a train engine: its attention function and training flags are ours only inside `borrowed`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from realgraph.runtime.attention.kv_cache import (
    CACHED_ATTENTION,
    Alike,
    DecodePass,
    KVCache,
    PrefillPass,
    cache_shape,
    register_attention,
)
from realgraph.runtime.cpu.decode import LeanDecoder, lean_applies
from realgraph.runtime.generate.decode_graph import DecodeGraphs, decode_logits

_MIN_SEGMENT_SLOTS = 16  # slots that share a segment at least
_SEGMENT_BYTES = 150_000  # reading this much costs about as much as one more attention call (CPU, 14 GB/s and 10 us)


def segments(lengths: NDArray[np.int64], spare: int) -> list[tuple[int, int, int]]:
    """Cut slots 0 ... n into runs (first, end, longest length), so that short rows read little.

    lengths: [n], tokens each slot's attention reads. A run grows while that reads at most `spare` more tokens than
    apart. Covers every slot once, in order.
    """
    runs: list[tuple[int, int, int]] = []
    for low in range(0, len(lengths), _MIN_SEGMENT_SLOTS):
        high = min(low + _MIN_SEGMENT_SLOTS, len(lengths))
        longest = int(lengths[low:high].max())
        if runs:
            first, _, other = runs[-1]
            together = max(longest, other)
            if (high - first) * together <= (low - first) * other + (high - low) * longest + spare:
                runs[-1] = (first, high, together)
                continue
        runs.append((low, high, longest))
    return runs


class CachedModel:
    """The module, its cache and, on a GPU, the graphs of its decode steps.

    Raises ValueError for a model with attention other than causal, full or sliding.
    """

    def __init__(self, module: nn.Module, cuda_graphs: bool) -> None:
        register_attention()
        config = module.config
        assert isinstance(config, PretrainedConfig)
        weight = next(module.parameters())
        self.device = weight.device
        self.max_length: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self.cache = KVCache(cache_shape(config, weight.dtype, weight.device))
        self.module = module
        self._config = config
        self.modules = list(module.modules())
        # dynamic rotary tables look at the positions on the host, which no graph can do
        rope = str(getattr(config, "rope_parameters", ""))
        replay = cuda_graphs and self.device.type == "cuda" and "dynamic" not in rope and "longrope" not in rope
        self._graphs = DecodeGraphs(module, self.cache) if replay else None
        self._lean = self._lean_decoder()
        shape = self.cache.shape
        self._spare_tokens = _SEGMENT_BYTES * shape.layers // shape.bytes_per_token

    def _lean_decoder(self) -> LeanDecoder | None:
        return LeanDecoder(self.module) if self.device.type == "cpu" and lean_applies(self.module) else None

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """The module with our attention, in evaluation mode and without gradients; afterwards as it was."""
        attention = self._config._attn_implementation
        training = [module for module in self.modules if module.training]
        self._config._attn_implementation = CACHED_ATTENTION
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            self._config._attn_implementation = attention
            for module in training:
                module.training = True

    def weights_changed(self) -> None:
        """To be called after every change of weights, in place or not."""
        if self._graphs is not None:
            self._graphs.weights_changed()
        self._lean = self._lean_decoder()

    def release(self) -> None:
        """Give the cache's memory back."""
        self.cache.release()
        if self._graphs is not None:
            self._graphs.drop()

    @property
    def prefill_returns_logits(self) -> bool:
        """`prefill` gives logits; it may change with the weights."""
        return self._lean is not None

    def prefill(self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Store the keys and values of tokens `rows[i]` from position `starts[i]` on of slot `slots[i]`. Returns the
        logits [n, V] after the last token of each row, where `prefill_returns_logits`."""
        counts = [len(row) for row in rows]
        widest = max(counts)
        tokens = torch.tensor([[*row, *[row[-1]] * (widest - len(row))] for row in rows], device=self.device)
        rollout_pass = PrefillPass(self.cache, slots, starts, counts)
        if self._lean is not None:
            last = torch.tensor([i * widest + count - 1 for i, count in enumerate(counts)], device=self.device)
            return self._lean.logits(tokens, rollout_pass.positions, rollout_pass, last)
        # no position is asked for logits: only the keys and values matter
        self.module(
            input_ids=tokens,
            position_ids=rollout_pass.positions,
            use_cache=False,
            logits_to_keep=tokens.new_empty(0),
            rollout_pass=rollout_pass,
        )
        return None

    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], states: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Logits [n, V] after the newest tokens [n], at positions [n], of slots 0 to n - 1; their keys are stored.
        states: [n], equal where slots hold equal tokens, which are then computed once where the walk can."""
        if self._graphs is not None:
            return self._graphs.logits(tokens.tolist(), positions.tolist())
        on_device = torch.from_numpy(positions).to(self.device)
        if self.device.type == "cpu":
            runs = segments(positions + 1, self._spare_tokens)
        else:
            runs = [(0, len(positions), int(positions.max()) + 1)]
        rollout_pass = DecodePass(self.cache, on_device, runs)
        newest = torch.from_numpy(tokens).to(self.device)
        if self._lean is not None:
            if states is None or (alike := Alike.of(states)) is None:
                return self._lean.logits(newest[:, None], on_device[:, None], rollout_pass)
            rollout_pass.alike = alike
            rows = alike.first
            return self._lean.logits(newest[rows, None], on_device[rows, None], rollout_pass)[alike.place]
        return decode_logits(self.module, newest, on_device, rollout_pass)
