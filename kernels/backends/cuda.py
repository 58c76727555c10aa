"""The operators on a GPU, by csrc/bucket.cu, csrc/paged_decode.cu and Triton's kernels.

The CUDA sources are built on first use by torch's extension machinery, for the GPUs of this host;
they include nothing of torch, so that it takes seconds, and are called through ctypes. Each
function here computes what reference.py's of that name does, or raises Declined.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from kernels.backends.declined import Declined
from kernels.backends.launch import Launchers
from kernels.build import SOURCES, alone, folder

CUDA_SOURCES = tuple(SOURCES / name for name in ("bucket.cu", "paged_decode.cu"))
NVCC_FLAGS = ("-O3", "-std=c++20")
REASON_MOST = 500  # characters of a compiler's complaint


def bucket_pack(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index]: [n, ...] by int64 [b] -> [b, ...], zeros where the index is negative. May
    decline.
    """
    with torch.cuda.device(rows.device):
        return launchers(rows.device).bucket_pack(rows, index)


def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """rows[index] = packed in place, but where the index is negative. May decline."""
    with torch.cuda.device(rows.device):
        launchers(rows.device).bucket_scatter(packed, index, rows)


def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Writes new_keys, new_values [n, kv_heads, width] into the cache, in place. May decline."""
    with torch.cuda.device(keys.device):
        launchers(keys.device).paged_write(keys, values, new_keys, new_values, table, positions)


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of queries [n, heads, width] over the cache -> like queries. May decline."""
    with torch.cuda.device(keys.device):
        return launchers(keys.device).paged_decode(
            queries, keys, values, table, lengths, scale, window
        )


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Causal attention of queries [t, heads, width] by sequence -> like queries. May decline."""
    tensors = [tensor.contiguous() for tensor in (queries, keys, values, starts)]
    with torch.cuda.device(queries.device):
        out: Tensor = _triton().varlen_prefill(*tensors, scale, window)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """The log-probability of one token of each row of logits -> [n] float32. May decline."""
    if not logits.is_contiguous():
        raise Declined
    with torch.cuda.device(logits.device):
        out: Tensor = _triton().token_logprob(logits, tokens.contiguous(), temperature.contiguous())
    return out


def _triton() -> ModuleType:
    try:
        from kernels.backends import triton_kernels
    except ImportError as error:
        raise Declined(f"no Triton: {error}") from error
    return triton_kernels


@cache
def launchers(device: torch.device) -> Launchers:
    """The launchers for one device; Declined if they cannot be built."""
    library = built()
    if isinstance(library, str):
        raise Declined(library)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Launchers(library, processors, lambda: torch.cuda.current_stream(device).cuda_stream)


@cache
def built() -> ctypes.CDLL | str:
    """The library of the CUDA sources, built if this machine has not built it yet; or why not."""
    from torch.utils import cpp_extension

    gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    seen = hashlib.sha256(f"{torch.__version__} {NVCC_FLAGS} {gpus}".encode())
    for source in CUDA_SOURCES:
        seen.update(source.read_bytes())
    name = f"meshrl_cuda_{seen.hexdigest()[:20]}"
    try:
        place = folder() / name
        place.mkdir(exist_ok=True)
        with alone(place / "meshrl.lock"):
            # torch's own lock outlives whoever dies with it, and would be waited for without end.
            (place / "lock").unlink(missing_ok=True)
            path = cpp_extension.load(
                name=name,
                sources=[str(source) for source in CUDA_SOURCES],
                extra_cuda_cflags=list(NVCC_FLAGS),
                extra_ldflags=["-Wl,--as-needed"],  # nothing of torch is called
                build_directory=str(place),
                with_cuda=True,
                is_python_module=False,
            )
        return ctypes.CDLL(path)
    except (OSError, RuntimeError) as error:
        return f"the CUDA sources cannot be built: {str(error)[:REASON_MOST]}"
