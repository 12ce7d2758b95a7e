"""Quantised checkpoints: read in any part, MXFP4 is the numbers of the standard's table, FP8 those times their
square's factor; they are saved as plain tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import ModelRole
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.quantised import GROUP, SQUARE, PackedSlice, ScaledSlice
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.engine import open_engine
from tests import tiny

CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5: without a sign
EXPERTS, IN, OUT = 3, 96, 10


class Whole:
    """A slice of a tensor that is in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def packed(seed: int, experts: int, inner: int, out: int) -> tuple[Tensor, Tensor]:
    """Random blocks [experts, out, groups, 16] and scales [experts, out, groups]."""
    draw = torch.Generator().manual_seed(seed)
    shape = (experts, out, inner // GROUP)
    blocks = torch.randint(256, (*shape, GROUP // 2), dtype=torch.uint8, generator=draw)
    return blocks, torch.randint(120, 126, shape, dtype=torch.uint8, generator=draw)


def by_the_table(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, in, out] float32, number by number."""
    experts, out, groups, half = blocks.shape
    found = torch.empty(experts, groups * 2 * half, out)
    for e in range(experts):
        for o in range(out):
            numbers = []
            for group, scale in zip(blocks[e, o].tolist(), scales[e, o].tolist(), strict=True):
                codes = [code for byte in group for code in (byte & 15, byte >> 4)]
                numbers += [(-1) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (scale - 127) for code in codes]
            found[e, :, o] = torch.tensor(numbers)
    return found


BLOCKS, SCALES = packed(0, EXPERTS, IN, OUT)
NUMBERS = by_the_table(BLOCKS, SCALES)


def spans(size: int) -> st.SearchStrategy[slice]:
    bounds = st.tuples(st.integers(0, size), st.integers(0, size)).filter(lambda pair: pair[0] != pair[1])
    return bounds.map(lambda pair: slice(min(pair), max(pair)))


@given(st.tuples(spans(EXPERTS), spans(IN), spans(OUT)))
def test_any_part_is_that_of_the_whole(box: tuple[slice, slice, slice]) -> None:
    view = PackedSlice(Whole(BLOCKS), Whole(SCALES))
    assert view.get_shape() == [EXPERTS, IN, OUT]
    assert torch.equal(view[box].float(), NUMBERS[box])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model packed, as gpt-oss is published, and with plain tensors."""
    plain, small = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    for folder in (plain, small):
        tiny.save(folder, "gpt_oss", intermediate_size=64)
    tensors = load_file(plain / "model.safetensors")
    files = dict(tensors)
    fused = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(fused) == 4
    for seed, name in enumerate(fused):
        blocks, scales = packed(seed, *tensors[name].shape)
        tensors[name] = by_the_table(blocks, scales)
        del files[name]
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(files, small / "model.safetensors", {"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (small / "config.json").write_text(json.dumps(config))
    return plain, small


def test_a_packed_model_is_the_plain_one_and_is_saved_unpacked(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, small = folders
    expected = dict(build(ModelRole(), str(plain), Start(CPU)).network.named_parameters())
    alone, one = LayoutRanks.alone(CPU), Layout(DeviceMesh(0, 1))
    engine = open_engine(ModelRole(dtype="float32"), str(small), one, alone, TrainSettings())
    for name, parameter in engine.model.network.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    engine.save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


def test_blocks_without_scales_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    tensors = load_file(folders[1] / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks' has no place"):
        build(ModelRole(), str(tmp_path), Start(CPU))


ROWS, COLUMNS = 2 * SQUARE + 5, SQUARE + 70


def scaled(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A random matrix in float8, and factors of its squares."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    return values, torch.rand(-(-rows // SQUARE), -(-columns // SQUARE), generator=draw) + 0.1


VALUES, FACTORS = scaled(0, ROWS, COLUMNS)
SQUARE_OF = torch.arange(ROWS)[:, None] // SQUARE, torch.arange(COLUMNS) // SQUARE


@given(st.tuples(spans(ROWS), spans(COLUMNS)))
def test_any_part_of_a_matrix_is_scaled_by_its_squares(box: tuple[slice, slice]) -> None:
    view = ScaledSlice(Whole(VALUES), Whole(FACTORS))
    assert view.get_shape() == [ROWS, COLUMNS]
    assert torch.equal(view[box], (VALUES.float() * FACTORS[SQUARE_OF])[box])


def test_a_model_in_fp8_is_the_plain_one(tmp_path: Path) -> None:
    plain, small = tmp_path / "plain", tmp_path / "small"
    shape = {"hidden_size": SQUARE + 32, "intermediate_size": 40}
    tensors = load_file(tiny.save(plain, "deepseek_v3", **shape) / "model.safetensors")
    tiny.save(small, "deepseek_v3", **shape)
    files = dict(tensors)
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    assert any(".experts.7." in name for name in matrices) and any("kv_b_proj" in name for name in matrices)
    for seed, name in enumerate(matrices):
        values, factors = scaled(seed, *tensors[name].shape)
        at = (torch.arange(len(values))[:, None] // SQUARE, torch.arange(values.shape[1]) // SQUARE)
        tensors[name] = values.float() * factors[at]
        files |= {name: values, f"{name}_scale_inv": factors}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(files, small / "model.safetensors", {"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [SQUARE, SQUARE]}
    (small / "config.json").write_text(json.dumps(config))
    found, expected = (
        dict(build(ModelRole(), str(one), Start(CPU)).network.named_parameters()) for one in (small, plain)
    )
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
