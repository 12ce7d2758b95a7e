"""The kernel that reads pages where they lie, against attention over what is gathered: by Triton's interpreter on a
CPU, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realgraph.runtime.attention.attention import ScoreShape
from realgraph.runtime.attention.kv_cache import CacheShape, KVCache
from realgraph.runtime.attention.paged import has_triton, n_parts, paged_attention, reads_pages
from realgraph.runtime.attention.pages import PAGE_TOKENS
from realgraph.runtime.attention.passes import Head, attend

LENGTHS = (3, 64, 290, 1)
KV_HEADS = 2
ROOT = Path(__file__).parents[1]


def filled(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[KVCache, Tensor]:
    """A cache of random numbers, NaN where no sequence has written, and the pages [n, m] of each, in any order."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    cache = KVCache(CacheShape(1, KV_HEADS, dim, dtype, device))
    cache.reserve(sum(counts))
    drawn = torch.randn(cache.layers[0].shape, generator=generator)
    tables = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int64)
    own = (1 + torch.randperm(sum(counts), generator=generator)).split(counts)
    for row, pages, length in zip(tables, own, LENGTHS, strict=True):
        row[: len(pages)] = pages
        last = drawn[:, pages[-1]].view(2, PAGE_TOKENS, -1)
        last[:, (length - 1) % PAGE_TOKENS + 1 :] = torch.nan
    cache.layers[0].copy_(drawn)
    return cache, tables.to(device)


def gathered(query: Tensor, cache: KVCache, tables: Tensor, positions: Tensor, head: Head) -> Tensor:
    """One sequence after the other, in float32."""
    out = []
    for i, length in enumerate((positions + 1).tolist()):
        first = 0 if head.window is None else max(0, length - head.window)
        rows = cache.rows_of(tables[i : i + 1, : -(-length // PAGE_TOKENS)])
        key, value = (x[:, :, first:].float() for x in cache.load(0, rows, 1, length))
        out.append(attend(query[i : i + 1].float(), key, value, key.new_zeros(1, 1, 1, length - first), head))
    return torch.cat(out)


CASES = (
    (64, 3, 0.125, ScoreShape()),
    (96, 1, 0.1, ScoreShape(window=70)),
    (64, 2, 0.125, ScoreShape(window=16, softcap=5.0)),
    (64, 2, 0.2, ScoreShape(sinks=torch.tensor([0.5, -2.0, 3.0, 0.0]))),
)


def check(device: torch.device, dtype: torch.dtype) -> None:
    positions = torch.tensor(LENGTHS, device=device) - 1
    for dim, group, scaling, asked in CASES:
        cache, tables = filled(dim, dtype, device)
        generator = torch.Generator().manual_seed(1)
        query = torch.randn(len(LENGTHS), KV_HEADS, group, dim, generator=generator).to(device, dtype)
        shape = asked._replace(sinks=None if asked.sinks is None else asked.sinks.to(device, dtype))
        found = paged_attention(query, cache.planes_of(0), tables, positions, scaling, shape)
        expected = gathered(query, cache, tables, positions, Head(scaling, *shape))
        within = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.float(), expected, rtol=within, atol=within)
        some = slice(2, 3)  # alone, the longest is read in two parts; among many in one
        alone = paged_attention(query[some], cache.planes_of(0), tables[some], positions[some], scaling, shape)
        torch.testing.assert_close(alone, found[some], rtol=within, atol=within)
        assert n_parts(1, KV_HEADS, tables.shape[1] * PAGE_TOKENS) == 2


@pytest.mark.parametrize(
    ("dtype", "dim", "planes"),
    [(torch.float64, 64, 2), (torch.float32, 256, 2), (torch.bfloat16, 512, 2), (torch.float32, 64, 1)],
)
def test_other_caches_are_gathered(dtype: torch.dtype, dim: int, planes: int) -> None:
    """On a GPU, too: in float64, with wider heads, and where values are of the keys; on a CPU all are."""
    value_dim = None if planes == 2 else 48
    for device in ("cuda", "cpu"):
        assert not reads_pages(CacheShape(1, KV_HEADS, dim, dtype, torch.device(device), value_dim))
    plain = CacheShape(1, KV_HEADS, 64, torch.bfloat16, torch.device("cuda"))
    assert reads_pages(plain) == has_triton()


def test_long_sequences_are_read_in_parts_and_many_are_not() -> None:
    assert n_parts(1, 8, 64) == 1
    assert n_parts(1, 8, 4096) == 16
    assert n_parts(256, 8, 4096) == 1
    assert all(n_parts(n, 2, length) >= 1 for n in (1, 1024) for length in (16, 1 << 17))


@pytest.mark.slow
def test_pages_are_read_where_they_lie() -> None:
    """Windows, soft caps and sinks; odd widths and groups; sequences in several parts. In another process, as Triton's
    interpreter is asked for before Triton is imported."""
    code = "import torch; from tests.test_paged_attention import check; check(torch.device('cpu'), torch.float32)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from realgraph.runtime.attention import paged_kernels

def compiled(kernel, types, constants, capability):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "cubin" in made.asm
    assert made.metadata.shared <= 99 << 10, made.metadata.shared

for capability in (80, 90):
    shape = {"KV_HEADS": 8, "GROUP": 4, "ROWS": 16}
    for number, width, window, single in (("bf16", 256, 0, True), ("fp32", 128, 70, False)):
        types = {"query": f"*{number}", "pages": f"*{number}", "tables": "*i64", "positions": "*i64"}
        types |= {"out": f"*{number}" if single else "*fp32", "sums": "*fp32", "scale": "fp32", "softcap": "fp32"}
        types |= {"plane_stride": "i64", "table_stride": "i32", "n": "i32", "parts": "i32"}
        constants = {**shape, "WINDOW": window, "CAPPED": window > 0, "SINGLE": single, "DIM": width, "WIDTH": width}
        compiled(paged_kernels.attend_part, types, constants, capability)
    types = {"partial": "*fp32", "sums": "*fp32", "sinks": "*bf16", "out": "*bf16", "n": "i32", "parts": "i32"}
    compiled(paged_kernels.join_parts, types, {"SINKS": True, "HEADS": 32, "DIM": 96, "WIDTH": 128}, capability)
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_fit_their_shared_memory() -> None:
    """For A100 and H100, without one."""
    run = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_read_where_they_lie_on_a_gpu(dtype: torch.dtype) -> None:
    check(torch.device("cuda"), dtype)
