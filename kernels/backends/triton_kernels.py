"""Triton kernels of attention within packed sequences and of token log-probabilities.

On CPU tensors they run in Triton's interpreter (TRITON_INTERPRET=1 before this module is imported),
which multiplies bfloat16 only after it is widened.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
LOGITS_PER_STEP = 4096  # columns between two updates of a row's running maximum


@triton.jit
def prefill_kernel(
    queries,
    keys,
    values,
    starts,
    out,
    sequences,
    search_steps,
    tokens,
    heads,
    kv_heads,
    scale,
    window,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute a tile of ROWS packed tokens of one head, of any sequences.

    A tile that many short sequences share costs no more than a tile for each: it iterates from the
    first token of its first sequence to its own end, and a mask limits each row to its sequence.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Start of each row's sequence: the last start that is not behind the row.
    low = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS], tl.int32) + sequences
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        reached = tl.load(starts + middle) <= rows
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    first = tl.load(starts + low)
    last = tl.load(starts + sequences)  # rows behind the last sequence are padding

    features = tl.arange(0, PADDED)
    own = (rows * heads + head).to(tl.int64)[:, None] * WIDTH + features[None, :]
    inside = features[None, :] < WIDTH
    q = tl.load(queries + own, mask=(rows < last)[:, None] & inside, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    kv_head = head // (heads // kv_heads)
    end = tl.minimum((tl.program_id(0) + 1) * ROWS, last)
    window_starts = tl.maximum(first, rows - window + 1)  # first token of each row's window
    for column in range(tl.min(window_starts), end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        there = (columns * kv_heads + kv_head).to(tl.int64)[:, None] * WIDTH + features[None, :]
        real = (columns < last)[:, None] & inside
        k = tl.load(keys + there, mask=real, other=0.0)
        v = tl.load(values + there, mask=real, other=0.0)
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (columns[None, :] >= window_starts[:, None]) & (columns[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)  # a row without a visible token so far
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(most - finite)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = now
    mixed = tl.where((rows < last)[:, None], mixed / total[:, None], 0.0)
    tl.store(out + own, mixed.to(out.dtype.element_ty), mask=(rows < tokens)[:, None] & inside)


@triton.jit
def logprob_kernel(logits, tokens, temperature, out, vocab, AT_ONCE: tl.constexpr):
    """Compute one row: the sum of its softmax, online, in one pass over the logits."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    warmth = tl.load(temperature + row)
    scale = 1.0 / tl.where(warmth == 0.0, 1.0, warmth)
    logits += row.to(tl.int64) * vocab
    most = float("-inf")
    total = tl.zeros([AT_ONCE], tl.float32)
    for first in range(0, vocab, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        now = tl.maximum(most, tl.max(x, 0))
        finite = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp((most - finite) * scale) + tl.exp((x - finite) * scale)
        most = now
    chosen = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
    logprob = (chosen - most) * scale - tl.log(tl.sum(total, 0))
    tl.store(out + row, tl.where(token < 0, 0.0, logprob))


def choose_tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return rows and columns of a tile, and warps: float32 multiplies without tensor cores."""
    if dtype == torch.float32 or width > 128:
        return {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 3}


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Compute reference.varlen_prefill for contiguous tensors; starts are not checked."""
    tokens, heads, width = queries.shape
    out = queries.new_empty(queries.shape)
    if out.numel() == 0:
        return out
    shape = choose_tile(width, queries.dtype)
    sequences = cu_seqlens.shape[0] - 1
    interpreted = not isinstance(prefill_kernel, triton.JITFunction)
    prefill_kernel[triton.cdiv(tokens, shape["ROWS"]), heads](
        queries,
        keys,
        values,
        cu_seqlens,
        out,
        sequences,
        sequences.bit_length(),
        tokens,
        heads,
        keys.shape[1],
        scale * LOG2_E,
        window or tokens,
        WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)),
        WIDE=interpreted or queries.dtype == torch.float32,
        **shape,
    )
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Compute reference.token_logprob for contiguous tensors; tokens are not checked."""
    out = temperature.new_empty(temperature.shape)
    if out.numel() == 0:
        return out
    logprob_kernel[(logits.shape[0],)](
        logits, tokens, temperature, out, logits.shape[1], AT_ONCE=LOGITS_PER_STEP, num_warps=8
    )
    return out
