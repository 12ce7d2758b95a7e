"""The Triton kernels of `paged.paged_attention`. Logarithms are of base 2. Imports triton."""

import triton
import triton.language as tl

from realgraph.runtime.attention.pages import PAGE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)
BLOCK = tl.constexpr(64)  # tokens that a program reads at a time
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def block_scores(query, key, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, BLOCK] logarithms of weights."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap x tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def with_block(found, total, most, scores, value):  # type: ignore[no-untyped-def]
    """Sums of values and of weights, both relative to 2 ** most, and `most` itself, with those of a block."""
    newest = tl.maximum(most, tl.max(scores, 1))
    shift = tl.where(newest == float("-inf"), 0.0, newest)  # a block may lie outside the window
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(most - shift)
    found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return found, total * kept + tl.sum(weights, 1), newest


@triton.jit(do_not_specialize=["table_stride", "n", "parts"])  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
    query,
    pages,
    tables,
    positions,
    out,
    sums,
    scale,
    softcap,
    plane_stride,
    table_stride,
    n,
    parts,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One part of one sequence's tokens, for the query heads of one key head. SINGLE: it writes
    the outputs; else its own average of values and the logarithm of its weights' sum."""
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + sequence) + 1
    first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK if WINDOW > 0 else 0
    per_part = tl.cdiv(tl.cdiv(length - first, BLOCK), parts) * BLOCK
    begin = first + part * per_part
    end = tl.minimum(begin + per_part, length)

    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    live, wide = rows < GROUP, columns < DIM
    heads = (sequence * KV_HEADS + head) * GROUP + rows
    inside = live[:, None] & wide[None, :]
    asked = tl.load(query + heads[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < end
        page = tl.load(tables + sequence * table_stride + at // PAGE, mask=there, other=0)
        places = (page * PAGE + at % PAGE) * (KV_HEADS * DIM) + head * DIM
        seen = there[:, None] & wide[None, :]
        key = tl.load(pages + places[:, None] + columns[None, :], mask=seen, other=0.0)
        value = tl.load(pages + plane_stride + places[:, None] + columns[None, :], mask=seen, other=0.0)
        visible = there & (at >= length - WINDOW) if WINDOW > 0 else there
        scores = block_scores(asked, key, scale, softcap, CAPPED)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        found, total, most = with_block(found, total, most, scores, value)

    if SINGLE:
        result = (found / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + heads[:, None] * DIM + columns[None, :], result, mask=inside)
    else:
        share = tl.where(total > 0, total, 1.0)  # of a part behind the end: nothing
        own = part * n * KV_HEADS * GROUP + heads
        tl.store(out + own[:, None] * DIM + columns[None, :], found / share[:, None], mask=inside)
        tl.store(sums + own, tl.where(total > 0, most + tl.log2(share), float("-inf")), mask=live)


@triton.jit(do_not_specialize=["n", "parts"])  # type: ignore[untyped-decorator]
def join_parts(  # type: ignore[no-untyped-def]
    partial,
    sums,
    sinks,
    out,
    n,
    parts,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The outputs of one head of one sequence, from its parts: their averages, weighted by their sums."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = sequence * HEADS + head
    columns = tl.arange(0, WIDTH)
    wide = columns < DIM
    highest = tl.load(sums + row)
    for part in range(1, parts):
        highest = tl.maximum(highest, tl.load(sums + part * n * HEADS + row))
    total = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
        total = tl.exp2(sink - highest)
    found = tl.zeros([WIDTH], tl.float32)
    for part in range(parts):
        own = part * n * HEADS + row
        weight = tl.exp2(tl.load(sums + own) - highest)
        found += weight * tl.load(partial + own.to(tl.int64) * DIM + columns, mask=wide, other=0.0)
        total += weight
    tl.store(out + row * DIM + columns, (found / total).to(out.dtype.element_ty), mask=wide)
