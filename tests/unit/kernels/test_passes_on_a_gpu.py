"""What a training pass computes on a real GPU: attention within bins and log-probabilities."""

import pytest
import torch

from meshrl.kernels.ops.linear_logprob import NARROWEST
from tests.unit.kernels import test_linear_logprob, test_varlen

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.timeout(300)]

# FlashAttention takes the first; float32 and float64 go through the buckets.
KINDS = [(torch.bfloat16, 0.05), (torch.float32, 2e-3), (torch.float64, 1e-10)]


@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 1, 32), (4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("window", [0, 17])
def test_attention_within_a_bin(
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
def test_log_probabilities_from_the_unembedding(
    dtype: torch.dtype, tolerance: float, at_once: int
) -> None:
    sizes = 17, 3 * NARROWEST + 7, 24
    test_linear_logprob.check(*sizes, dtype, tolerance, 0.7, at_once, device="cuda")
