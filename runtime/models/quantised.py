"""Weights in few bits, as some models are published: read in parts, as any other tensor.

MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): in place of a tensor [experts, in, out] files have `<name>_blocks`
[experts, out, in / 32, 16], two floats in each byte, and `<name>_scales` [experts, out, in / 32], of each 32 the
exponent. FP8 by blocks (DeepSeek-V3, arXiv:2412.19437, sec. 3.3.2): a matrix [out, in] in float8_e4m3, and
`<name>_scale_inv`, the factor of each square of 128 x 128.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GROUP = 32  # numbers with one exponent
BLOCKS, SCALES = "_blocks", "_scales"
SQUARE = 128  # rows and columns with one factor
FACTORS = "_scale_inv"


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


class ScaledSlice:
    """The same of a matrix in FP8 by blocks: float32."""

    def __init__(self, values: Any, factors: Any) -> None:
        """values, factors: the slices of both tensors."""
        self._values, self._factors = values, factors

    def get_shape(self) -> list[int]:
        """[out, in]"""
        return list(self._values.get_shape())

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """A box of it; slices have a start and a stop."""
        squares = tuple(slice(one.start // SQUARE, -(-one.stop // SQUARE)) for one in index)
        factors: Tensor = self._factors[squares].float()
        for dim, (one, square) in enumerate(zip(index, squares, strict=True)):
            each = factors.repeat_interleave(SQUARE, dim)
            factors = each.narrow(dim, one.start - square.start * SQUARE, one.stop - one.start)
        values: Tensor = self._values[index]
        return factors * values.float()


def unpacked(slices: Mapping[str, Any]) -> dict[str, Any]:
    """The slices of a checkpoint's tensors by name, of packed ones as of one tensor; blocks without scales stay."""
    found = dict(slices)
    for stored in slices:
        if stored + FACTORS in slices:
            found[stored] = ScaledSlice(found[stored], found.pop(stored + FACTORS))
        name = stored.removesuffix(BLOCKS)
        if name != stored and name + SCALES in slices:
            found[name] = PackedSlice(found.pop(stored), found.pop(name + SCALES))
    return found


def is_readable(quantization: Any) -> bool:
    """True for the `quantization_config` of a config.json whose weights are in one of the two forms."""
    if not isinstance(quantization, dict):
        return False
    method, squares = quantization.get("quant_method"), quantization.get("weight_block_size")
    return method == "mxfp4" or (method == "fp8" and squares == [SQUARE, SQUARE])
