"""Custom operators of decoding and packing, in PyTorch's namespace `meshrl`. Open `operators.py`
first.

| operator | on a CPU | on a GPU |
|---|---|---|
| bucket_pack, bucket_scatter | csrc/ops.cpp | csrc/bucket.cu |
| paged_write | csrc/ops.cpp | csrc/bucket.cu |
| paged_decode | csrc/ops.cpp | csrc/paged_decode.cu |
| varlen_prefill, token_logprob | csrc/ops.cpp | triton_kernels.py |

If an implementation cannot be built (no compiler, no Triton) or does not support a tensor (a head's
width, a stride), reference.py computes the same in plain PyTorch. A failed build is logged once.
All operators are for inference: none has a gradient. On a GPU, launches depend on shapes alone, so
that a CUDA graph can capture them, and an index out of range is a device-side assertion instead of
an IndexError.
"""

from meshrl.kernels.backends.cache_layout import BLOCK_TOKENS, get_cache_shapes
from meshrl.kernels.ops.dispatch import can_capture_cuda_graph
from meshrl.kernels.ops.operators import (
    bucket_pack,
    bucket_scatter,
    paged_decode,
    paged_write,
    token_logprob,
    varlen_prefill,
)

__all__ = [
    "BLOCK_TOKENS",
    "bucket_pack",
    "bucket_scatter",
    "can_capture_cuda_graph",
    "get_cache_shapes",
    "paged_decode",
    "paged_write",
    "token_logprob",
    "varlen_prefill",
]
