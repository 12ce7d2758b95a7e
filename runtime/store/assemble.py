"""Turns the store's entries into packed batches and back: keys and samples, gathered from their owners. Worker side."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import MASK, TOKENS, DType, KeyType
from realgraph.runtime.batch import Packed
from realgraph.runtime.job.sample_ids import group_of, sample_ids
from realgraph.runtime.store.shares import Share
from realgraph.runtime.store.store import Store, as_bytes
from realgraph.runtime.store.transfer import DataPlane, GatherRequest
from realgraph.runtime.wire.metrics import ArrivedBytes
from realgraph.runtime.wire.protocol import SampleSource

Values = dict[str, dict[int, Tensor]]

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
    "tokens": torch.int64,
    "text": torch.uint8,
    "json": torch.uint8,
    "experts": torch.uint8,  # of no sample; else as many bytes as numbers of experts take
}


def encode_values(values: Sequence[Any], key: KeyType) -> tuple[Tensor, list[int]]:
    """The values of a key as the store holds them, joined, and their lengths: text and json as UTF-8 bytes, scalars as
    one number. A tensor for each would cost more."""
    if key.dtype in ("text", "json"):
        text = key.dtype == "text"
        raw = [str(value).encode() if text else msgspec.json.encode(value) for value in values]
        return as_bytes(b"".join(raw)), [len(value) for value in raw]
    dtype = TORCH_DTYPES[key.dtype]
    if values and isinstance(values[0], Tensor):
        pieces = [value.to(dtype).cpu().reshape(-1) for value in values]
        return torch.cat(pieces), [len(piece) for piece in pieces]
    if key.level == "token" or key.dtype == "tokens" or isinstance(next(iter(values), None), list):
        return torch.tensor(list(itertools.chain.from_iterable(values)), dtype=dtype), [len(value) for value in values]
    return torch.tensor(values, dtype=dtype), [1] * len(values)


def decode_value(tensor: Tensor, key: KeyType) -> object:
    """The Python value of a stored tensor: str, a JSON value, a list of numbers, or a number."""
    if key.dtype == "text":
        return bytes(tensor.numpy()).decode()
    if key.dtype == "json":
        return msgspec.json.decode(bytes(tensor.numpy()))
    if key.level == "token" or key.dtype == "tokens":
        return tensor.tolist()
    return tensor.item()


class Assembler:
    """Gathers the keys of a call's samples and lays them out; puts back what a call has written."""

    def __init__(self, graph: Graph, store: Store, plane: DataPlane, timeout_seconds: float) -> None:
        self._graph, self._store, self._plane, self._timeout = graph, store, plane, timeout_seconds

    def group(self, sample: int) -> int:
        return group_of(sample)

    def gather(self, sources: Sequence[SampleSource], samples: Iterable[int], share: Share | None = None) -> Values:
        """Every key named by `sources` for those of `samples` that each source holds. Group keys go by group. share:
        see DataPlane.

        Nothing is copied: the values are to be read, never written, and to be let go soon (`packed` copies).
        """
        wanted = set(samples)
        wants = []
        for source in sources:
            present = [sample for sample in source.samples if sample in wanted]
            if not present:
                continue
            for name in source.keys:
                is_group = self._graph.keys[name].type.level == "group"
                ids = sorted({self.group(sample) for sample in present}) if is_group else present
                wants.append(GatherRequest(source.worker, name, tuple(ids)))
        return self._plane.gather_now(wants, deadline_seconds=self._timeout, copy=False, share=share)

    def arrived(self, sources: Sequence[SampleSource], values: Values, share: Share | None = None) -> ArrivedBytes:
        """The bytes among gathered values that other workers held; what another worker of this host has fetched has
        come from near."""
        total, own = ArrivedBytes(), self._plane.peer.worker
        fetchers = self._plane.fetchers(share, {source.worker for source in sources})
        for source in sources:
            if source.worker == own:
                continue
            n_bytes = sum(tensor.nbytes for tensor in self._of_source(source, values))
            far = self._plane.is_far(source.worker) and fetchers.get(source.worker, own) == own
            total += ArrivedBytes(0, n_bytes) if far else ArrivedBytes(n_bytes)
        return total

    def _of_source(self, source: SampleSource, values: Values) -> Iterator[Tensor]:
        for name in source.keys:
            is_group = self._graph.keys[name].type.level == "group"
            ids = {self.group(sample) for sample in source.samples} if is_group else source.samples
            present = values.get(name, {})
            yield from (present[id] for id in ids if id in present)

    def value(self, values: Values, name: str, sample: int) -> Tensor:
        """One sample's entry of a key at any level."""
        level = self._graph.keys[name].type.level
        return values[name][self.group(sample) if level == "group" else sample]

    def packed(self, values: Values, samples: Sequence[int], sequence: str = TOKENS, sampler: str = "") -> Packed:
        """The numeric keys of `values` for `samples`, in this order, as one batch of the tokens under `sequence`.

        sampler: the generate call whose keys have its name before them; the batch has them without."""
        tokens = [self.value(values, sequence, sample) for sample in samples]
        lengths = tuple(len(piece) for piece in tokens)
        token_keys: dict[str, Tensor] = {}
        sample_keys: dict[str, Tensor] = {}
        mask = torch.zeros(sum(lengths), dtype=torch.bool)
        for name in values:
            key = self._graph.keys[name].type
            if key.dtype in ("text", "json", "tokens"):
                continue
            pieces = [self.value(values, name, sample) for sample in samples]
            joined = torch.cat(pieces) if pieces else torch.zeros(0, dtype=TORCH_DTYPES[key.dtype])
            plain = name.removeprefix(f"{sampler}.")
            if plain == MASK:
                mask = joined
            elif key.level == "token":
                token_keys[plain] = joined
            else:
                sample_keys[plain] = joined
        return Packed(
            tokens=torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64),
            lengths=lengths,
            mask=mask,
            samples=tuple(samples),
            groups=tuple(self.group(sample) for sample in samples),
            token_keys=token_keys,
            sample_keys=sample_keys,
        )

    def put_packed(self, name: str, value: Tensor, batch: Packed) -> None:
        """Store a key computed for a packed batch: [T] is cut into samples, [N] into scalars."""
        key = self._graph.keys[name].type
        sizes = list(batch.lengths) if key.level == "token" else [1] * batch.n_samples
        self._store.put_pieces(name, batch.samples, value.to(TORCH_DTYPES[key.dtype]).cpu(), sizes)

    def put_tensors(self, name: str, ids: Sequence[int], values: Sequence[Tensor]) -> None:
        """Store a tensor of any shape and dtype by each id."""
        self._store.put(name, ids, values)

    def drop(self, groups: Sequence[int]) -> None:
        """Forget every key of these groups and of their samples."""
        gone, n = set(groups), self._graph.samples_per_group
        samples = [sample for group in gone for sample in sample_ids(group, n)]
        by_group = [name for name, key in self._graph.keys.items() if key.type.level == "group"]
        self._store.drop(by_group, gone)
        self._store.drop([name for name in self._graph.keys if name not in by_group], samples)

    def put_values(self, name: str, ids: Sequence[int], values: Sequence[object]) -> None:
        """Store Python values of a key, by sample or group id."""
        key = self._graph.keys[name].type
        self._store.put_pieces(name, ids, *encode_values(values, key))
