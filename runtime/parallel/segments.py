"""Weights in shared memory without a name, so that other workers of the host can read them where they lie. Linux."""

import logging
import os
import sys
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from realgraph.runtime.memory.anonymous import ALIGN_BYTES, aligned, map_bytes, open_anonymous

log = logging.getLogger(__name__)

MARK_BYTES = ALIGN_BYTES  # at the beginning of a segment: random, so that who opens it knows it for the one meant


class WeightSegment:
    """Shared memory in which tensors are placed one behind the other. The memory goes with the last tensor over it, in
    whatever process; the descriptor goes with this object."""

    def __init__(self, nbytes: int) -> None:
        """Room for `nbytes` of aligned tensors. Raises OSError where the system gives none."""
        self.nbytes = MARK_BYTES + nbytes
        self.descriptor = open_anonymous(self.nbytes)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        os.fchmod(self.descriptor, 0o600)
        self._room = torch.from_numpy(map_bytes(self.descriptor, self.nbytes, writable=True))
        self.mark = os.urandom(MARK_BYTES)
        self._room[:MARK_BYTES] = torch.frombuffer(bytearray(self.mark), dtype=torch.uint8)
        self._used = MARK_BYTES

    def place(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage here with the same bytes."""
        own = self._room.numpy()[self._used : self._used + storage.nbytes()]  # of numpy: a storage of its own size
        self._used += aligned(storage.nbytes())
        return torch.from_numpy(own).copy_(torch.empty(0, dtype=torch.uint8).set_(storage)).untyped_storage()

    def offset(self, tensor: Tensor) -> int | None:
        """The byte at which a tensor begins; None where it lies elsewhere."""
        first = tensor.data_ptr() - self._room.data_ptr()
        return first if 0 < first < self.nbytes else None


@torch.no_grad()
def share_weights(model: nn.Module) -> WeightSegment | None:
    """Move the parameters of a model on a CPU, of a shard what lies here, to a segment; None where there is no such
    memory. Before anything but the model refers to their storages, as masters and generators do."""
    if sys.platform != "linux":
        return None
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in _storing(model):
        if tensor.untyped_storage().nbytes():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    try:
        segment = WeightSegment(sum(aligned(first.untyped_storage().nbytes()) for first, *_ in by_storage.values()))
    except OSError as error:
        log.warning("weights are not shared with other workers of this host, but sent: %s", error)
        return None
    for tensors in by_storage.values():
        storage = segment.place(tensors[0].untyped_storage())
        for tensor in tensors:
            tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return segment


def _storing(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a model has of its parameters' storages: FSDP2 keeps each shard as DTensor and flat, padded."""
    for parameter in model.parameters():
        yield parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13; before
            for sharded in (one for group in groups if group is not None for one in group.fsdp_params):
                yield sharded._sharded_param_data
