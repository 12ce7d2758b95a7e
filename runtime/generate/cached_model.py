"""A transformers causal language model over a key-value cache: forward passes by pages. Knows no request.

The module may belong to a train engine: its attention function and training flags are ours only inside `borrowed`.

A pass through pipeline stages of several chunks may end here after others have begun, and pages may have changed hands
by then. That changes nothing: each chunk takes passes and copies of pages in the order in which they began.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig

from realgraph.runtime.attention.kv_cache import KVCache, cache_shape
from realgraph.runtime.attention.passes import CACHED_ATTENTION, Alike, DecodePass, PrefillPass, register_attention
from realgraph.runtime.cpu.decode import LeanDecoder, lean_applies
from realgraph.runtime.generate.cut_sampling import CutVocabulary
from realgraph.runtime.generate.decode_graph import DecodeGraphs, decode_logits
from realgraph.runtime.generate.sampling import SamplingSettings, draw
from realgraph.runtime.parallel.cuts import EMBEDDING
from realgraph.runtime.parallel.experts.passes import shared_passes_of
from realgraph.runtime.parallel.experts.routing import record_of
from realgraph.runtime.parallel.pipeline.rollout import Around, Draws, StagedPass, staged_rollout
from realgraph.runtime.parallel.tensor.network import edges_of
from realgraph.runtime.parallel.tensor.pieces import cut_of

_MIN_SEGMENT_ROWS = 16  # sequences that share a segment at least
_SEGMENT_BYTES = 150_000  # reading this much costs about as much as one more attention call (CPU, 14 GB/s and 10 us)
_GATHERED_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}  # of one segment's keys and values: what a core's cache holds


def segments(lengths: NDArray[np.int64], spare: int, most: int) -> list[tuple[int, int, int]]:
    """Cut sequences 0 ... n into runs (first, end, longest length), so that short rows read little.

    lengths: [n], tokens each sequence's attention reads. A run grows while that reads at most `spare` more tokens than
    apart, and at most `most` in all. Covers every sequence once, in order.
    """
    runs: list[tuple[int, int, int]] = []
    for low in range(0, len(lengths), _MIN_SEGMENT_ROWS):
        high = min(low + _MIN_SEGMENT_ROWS, len(lengths))
        longest = int(lengths[low:high].max())
        if runs:
            first, _, other = runs[-1]
            together = (high - first) * max(longest, other)
            if together <= min(most, (low - first) * other + (high - low) * longest + spare):
                runs[-1] = (first, high, max(longest, other))
                continue
        runs.append((low, high, longest))
    return runs


def rectangles(n: int, length: int, most: int) -> list[tuple[int, int, int]]:
    """Cut sequences 0 ... n, all read to one length, into runs of at most `most` tokens, or of one sequence."""
    rows = max(1, most // length)
    return [(low, min(low + rows, n), length) for low in range(0, n, rows)]


def _cut_vocabulary(module: nn.Module) -> CutVocabulary | None:
    """The cut of the logits over tensor-parallel ranks."""
    cut = cut_of(module)
    return CutVocabulary(cut.ranks, cut.by_name[EMBEDDING].spans) if EMBEDDING in cut.by_name else None


class CachedModel:
    """The module (this rank's part of it), its cache and, on a GPU, the graphs of its decode steps.

    Raises ValueError for a model with attention other than causal, full or sliding.
    """

    def __init__(self, module: nn.Module, cuda_graphs: bool) -> None:
        register_attention()
        config = module.config
        assert isinstance(config, PretrainedConfig)
        network: Any = module
        weight = next(module.parameters())
        self.device = weight.device
        self.max_length: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self._staged = staged_rollout(module)
        numbers = range(config.num_hidden_layers) if self._staged is None else self._staged.layers
        attention = next(iter(network.model.layers)).self_attn
        self.cache = KVCache(replace(cache_shape(config, attention, weight), layers=len(numbers)), numbers)
        self._edges, self._cut, self._shared = edges_of(module), _cut_vocabulary(module), shared_passes_of(module)
        self.module, self._record = module, record_of(module)
        self._config = config
        self.modules = list(module.modules())
        # dynamic rotary tables look at the positions on the host, experts at their loads, which no graph can do
        rope = str(getattr(config, "rope_parameters", ""))
        on_host = "dynamic" in rope or "longrope" in rope or self._record is not None
        replay = cuda_graphs and self.device.type == "cuda" and not on_host and self._staged is None
        shape = self.cache.shape
        per_token = shape.bytes_per_token // shape.layers
        self._spare_tokens, self._most_tokens = (
            n // per_token for n in (_SEGMENT_BYTES, _GATHERED_BYTES[self.device.type])
        )
        self._graphs = DecodeGraphs(module, self.cache, self._runs) if replay else None
        self._lean = self._lean_decoder()
        self._in_step = False

    def _runs(self, n: int, length: int) -> list[tuple[int, int, int]]:
        return rectangles(n, length, self._most_tokens)

    def _lean_decoder(self) -> LeanDecoder | None:
        applies = self._staged is None and lean_applies(self.module)
        return LeanDecoder(self.module) if applies else None

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """A step: the module with our attention, in evaluation mode and without gradients; afterwards as it was."""
        self._in_step = True
        attention = self._config._attn_implementation
        training = [module for module in self.modules if module.training]
        self._config._attn_implementation = CACHED_ATTENTION
        if self._edges is not None:
            self._edges.begin_plain()
        if self._record is not None:
            self._record.replay(None)
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            self._config._attn_implementation = attention
            for module in training:
                module.training = True

    @property
    def lanes(self) -> int:
        """Passes that can be under way at a time, each of other sequences: on different pipeline stages."""
        return 1 if self._staged is None else self._staged.lanes

    def draw(self, logits: Tensor | StagedPass, settings: SamplingSettings, positions: Tensor) -> Draws:
        """A token per row of logits that `prefill` and `decode` gave; see `sampling.draw`. On every rank the same."""
        how = draw if self._cut is None else self._cut.draw
        if isinstance(logits, StagedPass):
            assert self._staged is not None
            return self._staged.draw(logits, lambda found: how(found, settings, positions))
        return Draws(how(logits, settings, positions))

    def finish_transfers(self) -> None:
        """Wait until all that was sent to other stages has left."""
        if self._staged is not None:
            self._staged.finish()

    def finish_passes(self) -> None:
        """End the passes of a step, once. Those of replicas that share experts go on with this worker's. Collective
        over them and the stages."""
        if not self._in_step:
            return
        self._in_step = False
        if self._shared is not None:
            while self._another(own=False):
                if self._staged is None:
                    self._shared.pass_by(0)
                else:
                    self._staged.begin(self._shared.pass_by)
        if self._staged is not None:
            self._staged.end()

    def stages_meet(self) -> None:
        """To be called before a collective of all stages between two passes."""
        if self._staged is not None:
            self._staged.expect()

    def _another(self, *, own: bool) -> bool:
        """A pass follows, here or on a replica that shares experts; own: here."""
        if self._shared is None:
            return own
        if self._shared.of_all_stages:
            self.stages_meet()
        return self._shared.another(own=own)

    def copy_pages(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Pages `to` take what pages `source` hold, behind all passes that have begun."""
        if self._staged is None:
            self.cache.copy(to, source)
        else:
            layers = self._staged.chunk_layers
            self._staged.before_next(lambda chunk: self.cache.copy(to, source, layers(chunk)))

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

    def prefill(
        self, pages: Sequence[Sequence[int]], starts: Sequence[int], rows: Sequence[Sequence[int]], around: Around
    ) -> Tensor | None:
        """Store the keys and values of tokens `rows[i]` from position `starts[i]` on in `pages[i]`. Returns the
        logits [n, V] after the last token of each row, where `prefill_returns_logits`. around: see `StagedPass`."""
        counts = [len(row) for row in rows]
        widest = max(counts)
        tokens = torch.tensor([[*row, *[row[-1]] * (widest - len(row))] for row in rows], device=self.device)
        rollout_pass = PrefillPass(self.cache, pages, starts, counts)
        self._another(own=True)
        if self._lean is not None:
            last = torch.tensor([i * widest + count - 1 for i, count in enumerate(counts)], device=self.device)
            return self._lean.logits(tokens, rollout_pass.positions, rollout_pass, last)
        if self._staged is not None:
            self._staged.begin(StagedPass(tokens, rollout_pass.positions, {"rollout_pass": rollout_pass}, around))
            return None
        # no position is asked for logits: only the keys and values matter
        with around(0):
            self.module(
                input_ids=tokens,
                position_ids=rollout_pass.positions,
                use_cache=False,
                logits_to_keep=tokens.new_empty(0),
                rollout_pass=rollout_pass,
            )
        return None

    def decode(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        tables: NDArray[np.int64],
        states: NDArray[np.int64],
        around: Around,
    ) -> Tensor | StagedPass:
        """Logits [n, V] after the newest tokens [n], at positions [n], of n sequences with pages `tables` [n, m]; the
        pass itself in pipeline stages. Their keys are stored. states: [n], equal where sequences hold equal tokens,
        which are then computed once where the walk can. around: see `StagedPass`."""
        if self._graphs is not None:
            return self._graphs.logits(tokens, positions, tables)
        if self._staged is not None:  # the pass may end when the columns have changed
            positions, tables = positions.copy(), tables.copy()
        on_device, pages = torch.from_numpy(positions).to(self.device), torch.from_numpy(tables).to(self.device)
        if self.device.type == "cpu":
            runs = segments(positions + 1, self._spare_tokens, self._most_tokens)
        else:
            runs = self._runs(len(positions), int(positions.max()) + 1)
        rollout_pass = DecodePass(self.cache, pages, on_device, runs)
        newest = torch.from_numpy(tokens).to(self.device)
        self._another(own=True)
        if self._staged is not None:
            one = StagedPass(newest[:, None], on_device[:, None], {"rollout_pass": rollout_pass}, around)
            self._staged.begin(one)
            return one
        if self._lean is not None:
            if (alike := Alike.of(states)) is None:
                return self._lean.logits(newest[:, None], on_device[:, None], rollout_pass)
            rollout_pass.alike = alike
            rows = alike.first
            return self._lean.logits(newest[rows, None], on_device[rows, None], rollout_pass)[alike.place]
        with around(0):
            return decode_logits(self.module, newest, on_device, rollout_pass)
