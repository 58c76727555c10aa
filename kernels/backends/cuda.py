"""Operators on a GPU, by csrc/bucket.cu, csrc/paged_decode.cu and Triton's kernels.

A prebuilt library (`kernels/cuda_build.py`) takes precedence. Without one, torch's extension
machinery builds the CUDA sources on first use, for the GPUs of this host. The sources include no
torch headers, so that a build takes seconds, and are called through ctypes. Each function computes
what the function of that name in reference.py does, or raises KernelUnsupported.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshrl.kernels.backends.cuda_launchers import Launchers
from meshrl.kernels.backends.kernel_unsupported import KernelUnsupported
from meshrl.kernels.cuda_build import CUDA_SOURCES, NVCC_FLAGS, find_prebuilt
from meshrl.kernels.library_build import get_cache_directory, lock_build

MAX_REASON_CHARS = 500  # maximum characters of a compiler's error


def _make_launcher_call(name: str) -> Callable[..., Any]:
    """Return the operator of this name, called through the launchers of its first tensor's
    device.
    """

    def run(first: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device(first.device):
            return getattr(get_launchers(first.device), name)(first, *arguments)

    return run


bucket_pack = _make_launcher_call("bucket_pack")
bucket_scatter = _make_launcher_call("bucket_scatter")
paged_write = _make_launcher_call("paged_write")
paged_decode = _make_launcher_call("paged_decode")


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Compute the reference's operator; may raise KernelUnsupported."""
    tensors = [tensor.contiguous() for tensor in (queries, keys, values, cu_seqlens)]
    with torch.cuda.device(queries.device):
        out: Tensor = _import_triton_kernels().varlen_prefill(*tensors, scale, window)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-probability of one token of each row of logits, [n] float32.

    May raise KernelUnsupported.
    """
    if not logits.is_contiguous():
        raise KernelUnsupported
    with torch.cuda.device(logits.device):
        out: Tensor = _import_triton_kernels().token_logprob(
            logits, tokens.contiguous(), temperature.contiguous()
        )
    return out


def _import_triton_kernels() -> ModuleType:
    try:
        from meshrl.kernels.backends import triton_kernels
    except ImportError as error:
        raise KernelUnsupported(f"Triton cannot be imported: {error}") from error
    return triton_kernels


@cache
def get_launchers(device: torch.device) -> Launchers:
    """Return the launchers of one device; raise KernelUnsupported if they cannot be built."""
    library = build_library()
    if isinstance(library, str):
        raise KernelUnsupported(library)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Launchers(library, processors, lambda: torch.cuda.current_stream(device).cuda_stream)


@cache
def build_library() -> ctypes.CDLL | str:
    """Return the library of the CUDA sources: prebuilt, else built if needed, or the reason why
    there is none.
    """
    gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    prebuilt = find_prebuilt(torch.version.cuda, gpus)
    reason = prebuilt.reason
    try:
        if prebuilt.path is not None:
            return prebuilt.load()
    except OSError as error:
        reason = f"the prebuilt CUDA kernels cannot be loaded: {error}"
    built = _build_for_gpus(gpus)
    return f"{reason}; {built}" if reason and isinstance(built, str) else built


def _build_for_gpus(gpus: list[tuple[int, int]]) -> ctypes.CDLL | str:
    from torch.utils import cpp_extension

    hasher = hashlib.sha256(f"{torch.__version__} {NVCC_FLAGS} {gpus}".encode())
    for source in CUDA_SOURCES:
        hasher.update(source.read_bytes())
    name = f"meshrl_cuda_{hasher.hexdigest()[:20]}"
    try:
        place = get_cache_directory() / name
        place.mkdir(exist_ok=True)
        with lock_build(place / "meshrl.lock"):
            # Torch's own lock file outlives a process that dies with it, and later builds would
            # wait forever.
            (place / "lock").unlink(missing_ok=True)
            path = cpp_extension.load(
                name=name,
                sources=[str(source) for source in CUDA_SOURCES],
                extra_cuda_cflags=list(NVCC_FLAGS),
                extra_ldflags=["-Wl,--as-needed"],  # the library does not call torch
                build_directory=str(place),
                with_cuda=True,
                is_python_module=False,
            )
        return ctypes.CDLL(path)
    except (OSError, RuntimeError) as error:
        return f"the CUDA sources cannot be built: {str(error)[:MAX_REASON_CHARS]}"
