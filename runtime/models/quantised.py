"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published: read in parts, as any other tensor.

In place of a tensor [experts, in, out] files have `<name>_blocks` [experts, out, in / 32, 16], two floats in each byte,
and `<name>_scales` [experts, out, in / 32], of each 32 the exponent.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GROUP = 32  # numbers with one exponent
BLOCKS, SCALES = "_blocks", "_scales"


class PackedSlice:
    """Like `safe_open(...).get_slice` of the tensor that was packed: bfloat16, which holds every such number."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        """blocks, scales: the slices of both tensors."""
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """[experts, in, out]"""
        experts, out, groups, _ = self._blocks.get_shape()
        return [experts, groups * GROUP, out]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        """A box of it; slices have a start and a stop."""
        experts, inner, out = index
        first = inner.start // GROUP
        groups = slice(first, -(-inner.stop // GROUP))
        values = convert_moe_packed_tensors(self._blocks[experts, out, groups], self._scales[experts, out, groups])
        part: Tensor = values[:, inner.start - first * GROUP : inner.stop - first * GROUP]
        return part


def unpacked(slices: Mapping[str, Any]) -> dict[str, Any]:
    """The slices of a checkpoint's tensors by name, of packed ones as of one tensor; blocks without scales stay."""
    found = dict(slices)
    for stored in slices:
        name = stored.removesuffix(BLOCKS)
        if name != stored and name + SCALES in slices:
            found[name] = PackedSlice(found.pop(stored), found.pop(name + SCALES))
    return found
