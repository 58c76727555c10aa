"""Operators on a real GPU, against float64 and within a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshrl.kernels import ops
from meshrl.kernels.backends import cuda
from meshrl.kernels.ops.linear_logprob import MIN_CHUNK_IDS
from tests.unit.kernels import test_linear_logprob, test_varlen
from tests.unit.kernels.operators_under_test import (
    DTYPES,
    Attended,
    check_buckets,
    check_paged_decode,
    check_paged_write,
    check_token_logprob,
    check_varlen_prefill,
)

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.timeout(300)]


class OnGpu:
    """CUDA implementations that take CPU tensors and copy in-place results back. They are called
    directly, because the operators would fall back to the reference.
    """

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor | None]:
        def call(*arguments: Any) -> torch.Tensor | None:
            moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
            found = getattr(cuda, name)(*moved)
            for here, there in zip(arguments, moved, strict=True):
                if isinstance(here, torch.Tensor):
                    here.copy_(there)
            return None if found is None else found.cpu()

        return call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_attention_matches_float64(group: int, width: int, dtype: torch.dtype) -> None:
    case = Attended([0, 17, 600, 129], group, 2, width, dtype)
    check_paged_decode(OnGpu(), case)
    check_paged_decode(OnGpu(), case, spare_blocks=300)
    check_paged_write(OnGpu(), case)
    check_varlen_prefill(OnGpu(), case, padding=40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buckets_and_logprobs_match_float64(dtype: torch.dtype) -> None:
    check_buckets(OnGpu(), [-1, 3, 0, -1, 6])
    for vocab in (1, 4096, 151_936):
        check_token_logprob(OnGpu(), vocab, dtype, 1)


def test_graph_replays_a_decode_step_on_new_contents() -> None:
    keys_shape, values_shape = ops.get_cache_shapes(64, 2, 64, torch.bfloat16)
    keys = torch.zeros(keys_shape, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros(values_shape, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(2, 32)
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    new, query = (torch.randn(2, n, 64, device="cuda").bfloat16() for n in (2, 4))

    def step() -> torch.Tensor:
        ops.paged_write(keys, values, new, new, table, positions)
        out: torch.Tensor = ops.paged_decode(
            query, keys, values, table, (positions + 1).int(), 0.125
        )
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for position in range(1, 40):
        positions.fill_(position)
        new.copy_(torch.randn_like(new))
        graph.replay()
    assert torch.equal(out, step())


# FlashAttention handles bfloat16; float32 and float64 use the buckets.
KINDS = [(torch.bfloat16, 0.05), (torch.float32, 2e-3), (torch.float64, 1e-10)]


@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 1, 32), (4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("window", [0, 17])
def test_attention_within_a_bin_matches_float64(
    dtype: torch.dtype,
    tolerance: float,
    heads: int,
    kv_heads: int,
    width: int,
    padding: int,
    window: int,
) -> None:
    device, lengths = torch.device("cuda"), test_varlen.LENGTHS
    test_varlen.check(lengths, heads, kv_heads, width, dtype, tolerance, padding, device, window)


@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("at_once", [0, 1])
def test_linear_logprob_matches_float64(dtype: torch.dtype, tolerance: float, at_once: int) -> None:
    sizes = 17, 3 * MIN_CHUNK_IDS + 7, 24
    test_linear_logprob.check(*sizes, dtype, tolerance, 0.7, at_once, device="cuda")
