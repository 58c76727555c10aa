"""Test cases of the operators, with expected results computed in float64 from the definitions.

An implementation is any object with the operators' functions: meshrl.kernels.backends.reference,
.native, .triton_kernels, or .launch.Launchers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from meshrl.kernels.ops import BLOCK_TOKENS, get_cache_shapes

DTYPES = (torch.float32, torch.bfloat16)
# For an output of about 1: sums in float32; for bf16 also the rounding of weights and output.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
# Lengths around the borders of a block of 16 tokens, of a chunk of 128 and of a GPU's split.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 144, 257, 300)

lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 200))
widths = st.sampled_from((32, 64, 128))
dtypes = st.sampled_from(DTYPES)


@dataclass(frozen=True)
class Attended:
    """Random sequences of these lengths with their heads and seed."""

    lengths: list[int]
    group: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    seed: int = 0
    window: int = 0

    def sequences(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each sequence queries [length, heads, width], keys and values [length,
        kv_heads, width].
        """
        chance = torch.Generator().manual_seed(self.seed)
        heads = (self.group * self.kv_heads, self.kv_heads, self.kv_heads)
        return [
            cast(
                tuple[Tensor, Tensor, Tensor],
                tuple(
                    torch.randn(length, n, self.width, generator=chance).to(self.dtype)
                    for n in heads
                ),
            )
            for length in self.lengths
        ]

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.width)


attended = st.builds(
    Attended,
    lengths=st.lists(lengths, min_size=1, max_size=3),
    group=st.sampled_from(GROUPS),
    kv_heads=st.integers(1, 3),
    width=widths,
    dtype=dtypes,
    seed=st.integers(0, 99),
    window=st.one_of(st.just(0), st.integers(1, 200)),
)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, first: int, scale: float, window: int = 0
) -> Tensor:
    """Compute attention in float64: query r of [rows, heads, width] sees tokens up to `first` + r.
    Of those it sees the last `window` (0: all).
    """
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros(queries.shape, dtype=torch.float64)
    last = first + torch.arange(queries.shape[0])
    hidden = torch.arange(keys.shape[0]) > last[:, None]
    if window:
        hidden |= torch.arange(keys.shape[0]) <= last[:, None] - window
    for head in range(queries.shape[1]):
        scores = queries[:, head].double() @ keys[:, head // group].double().T * scale
        weights = scores.masked_fill(hidden, -math.inf).softmax(1)
        out[:, head] = weights @ values[:, head // group].double()
    return out


def close(found: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class Paged:
    """Cache with the case's sequences in shuffled blocks and NaN in all other elements."""

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


def paged(case: Attended, spare_blocks: int = 2) -> Paged:
    """Build the cache token by token from the definition of its layout."""
    needed = [-(-length // BLOCK_TOKENS) for length in case.lengths]
    width = max(needed) + spare_blocks
    chance = torch.Generator().manual_seed(case.seed)
    free = torch.randperm(sum(needed) + 3, generator=chance).tolist()
    shapes = get_cache_shapes(len(free), case.kv_heads, case.width, case.dtype)
    keys, values = (torch.full(shape, math.nan, dtype=case.dtype) for shape in shapes)
    table = torch.full((len(needed), width), -1, dtype=torch.int32)
    for i, (_, k, v) in enumerate(case.sequences()):
        for t in range(case.lengths[i]):
            if t % BLOCK_TOKENS == 0:
                table[i, t // BLOCK_TOKENS] = free.pop()
            block, at = int(table[i, t // BLOCK_TOKENS]), t % BLOCK_TOKENS
            if case.dtype == torch.bfloat16:
                keys[block, :, :, at] = k[t].view(case.kv_heads, -1, 2)
                values[block, :, at // 2, :, at % 2] = v[t]
            else:
                keys[block, :, :, at] = k[t]
                values[block, :, at] = v[t]
    return Paged(keys, values, table, torch.tensor(case.lengths, dtype=torch.int32))


def check_paged_decode(implementation: Any, case: Attended, spare_blocks: int = 2) -> None:
    cache = paged(case, spare_blocks)
    shape = (len(case.lengths), case.group * case.kv_heads, case.width)
    chance = torch.Generator().manual_seed(case.seed + 1)
    queries = torch.randn(shape, generator=chance).to(case.dtype)
    exact = torch.zeros(shape, dtype=torch.float64)
    for i, (_, k, v) in enumerate(case.sequences()):
        if case.lengths[i]:
            last = case.lengths[i] - 1
            exact[i] = attention(queries[i : i + 1], k, v, last, case.scale, case.window)[0]
    arguments = (cache.keys, cache.values, cache.table, cache.lengths)
    close(implementation.paged_decode(queries, *arguments, case.scale, case.window), exact)


def check_paged_write(implementation: Any, case: Attended) -> None:
    """Check that tokens written in any order are where `paged` puts them, and nothing else
    changes.
    """
    cache = paged(case)
    keys, values = cache.keys.clone(), cache.values.clone()
    keys[cache.table[cache.table >= 0]] = 7.0  # to be overwritten
    values[cache.table[cache.table >= 0]] = 7.0
    expected_keys = cache.keys.clone().where(cache.keys == cache.keys, keys)
    expected_values = cache.values.clone().where(cache.values == cache.values, values)
    rows = [(i, t) for i, length in enumerate(case.lengths) for t in range(length)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(case.seed)).tolist()
    rows = [rows[o] for o in order]
    sequences = case.sequences()
    nothing = torch.full((1, case.kv_heads, case.width), 9.0, dtype=case.dtype)
    new_keys = torch.cat([nothing, *(sequences[i][1][t : t + 1] for i, t in rows)])
    new_values = torch.cat([nothing, *(sequences[i][2][t : t + 1] for i, t in rows)])
    table = cache.table[[0, *(i for i, _ in rows)]]
    positions = torch.tensor([-1, *(t for _, t in rows)])
    implementation.paged_write(keys, values, new_keys, new_values, table, positions)
    assert torch.equal(keys.nan_to_num(99.0), expected_keys.nan_to_num(99.0))
    assert torch.equal(values.nan_to_num(99.0), expected_values.nan_to_num(99.0))


def check_varlen_prefill(implementation: Any, case: Attended, padding: int = 0) -> None:
    sequences = case.sequences()
    parts = [torch.cat(tensors) for tensors in zip(*sequences, strict=True)]
    filled = [torch.cat([p, p.new_full((padding, *p.shape[1:]), math.nan)]) for p in parts]
    starts = torch.tensor([0, *case.lengths]).cumsum(0).int()
    exact = [attention(*sequence, 0, case.scale, case.window) for sequence in sequences]
    exact.append(torch.zeros(padding, *parts[0].shape[1:], dtype=torch.float64))
    found = implementation.varlen_prefill(*filled, starts, case.scale, case.window)
    close(found, torch.cat(exact))


def check_token_logprob(implementation: Any, vocab: int, dtype: torch.dtype, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.5, 1.0])
    logits = (torch.randn(5, vocab, generator=chance) * 4 + 100 * seed).to(dtype)
    tokens = torch.randint(vocab, (5,), generator=chance)
    tokens[4] = -1
    if vocab > 1:
        masked = torch.rand(5, vocab, generator=chance) < 0.2
        logits[masked.scatter_(1, tokens.clamp(min=0)[:, None], False)] = -math.inf
    exact = torch.zeros(5, dtype=torch.float64)
    for i in range(4):
        row = logits[i].double() / (float(temperature[i]) or 1.0)
        exact[i] = row.log_softmax(0)[tokens[i]]
    found = implementation.token_logprob(logits, tokens, temperature)
    assert found.dtype == torch.float32
    # A logit of a thousand has a rounding error of 4e-6, divided by the temperature.
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)


ROWS = (
    torch.arange(35, dtype=torch.int64).view(7, 5),
    torch.arange(7 * 24, dtype=torch.float32).view(7, 3, 8),
    torch.arange(21).view(7, 3).to(torch.bfloat16),
    torch.arange(7) % 2 == 0,
    torch.zeros(7, 0),
)


def check_buckets(implementation: Any, index: list[int]) -> None:
    """Check that lanes are copies of their rows and that scattering changes only those rows."""
    lanes = torch.tensor(index, dtype=torch.int64)
    for rows in ROWS:
        packed = implementation.bucket_pack(rows, lanes)
        assert packed.shape == (len(index), *rows.shape[1:])
        for lane, row in enumerate(index):
            assert torch.equal(packed[lane], rows[row] if row >= 0 else torch.zeros_like(rows[0]))
        target = torch.zeros_like(rows)
        implementation.bucket_scatter(packed, lanes, target)
        kept = torch.tensor([row in index for row in range(7)])
        assert torch.equal(target[kept], rows[kept])
        assert not target[~kept].any()
