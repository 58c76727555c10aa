"""Buckets of tensors in memory that an SGLang server maps, and the handles to them.

A bucket is one flat tensor, in SGLang's format `flattened_bucket`. Its handle names shared memory
of this host, or memory of a GPU by CUDA IPC. SGLang 0.5.23 reads handles as pickles, through its
list of allowed names. This module makes them, and makes the only pickles in the product.

Each bucket has memory of its own, which a rank of the server may read after it has answered. The
memory is freed when the sender and all ranks have released it.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from meshrl.common.base.errors import MeshError
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.services.engine.sglang.server_tensors import describe_tensors

ALIGNMENT = 16  # bytes; a view of another dtype requires a multiple of its element
SHARED_MEMORY = "/dev/shm"
DEVICE_ARGUMENT = 6  # of torch's `rebuild_cuda_tensor`: the GPU, which SGLang accepts as a UUID


class CannotShare(MeshError):
    """Error of a sender that could not make a bucket, of which the server has received nothing."""

    code = "cannot_share"


@dataclass(frozen=True)
class Bucket:
    """Bucket with a copy for each rank of the server; one copy serves all ranks on a CPU."""

    copies: Sequence[Tensor]
    entries: Sequence[SimpleNamespace]  # fields of SGLang's FlattenedTensorMetadata

    def make_handles(self, ranks: int) -> list[str]:
        """Return a handle for each rank.

        Each holds one reference to the memory, and the rank that opens it releases that reference.
        A handle that several ranks open would free the memory before the last one is done.
        """
        flats = self.copies if len(self.copies) == ranks else [self.copies[0]] * ranks
        return [_pickle_handle(flat, self.entries) for flat in flats]


def fill_shared_bucket(names: Sequence[str], state: Mapping[str, Tensor]) -> Bucket:
    """Copy these tensors into a bucket of shared host memory."""
    entries, size_bytes = lay_out_bucket(names, describe_tensors(state))
    space = os.statvfs(SHARED_MEMORY)
    free_bytes = space.f_bavail * space.f_frsize
    if size_bytes > free_bytes:  # writing to it would kill the process with SIGBUS
        raise CannotShare(
            f"a bucket has {size_bytes >> 20} MiB, and {SHARED_MEMORY} has {free_bytes >> 20} free",
            where="rollout.sglang_weights",
            fix='Enlarge it (docker --shm-size), or set rollout.sglang_weights = "disk"',
        )
    # The default passes descriptors through a socket, which crashes SGLang's scheduler.
    torch.multiprocessing.set_sharing_strategy("file_system")
    storage = torch.UntypedStorage._new_shared(size_bytes)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    _fill(flat, entries, state)
    return Bucket([flat], entries)


def fill_gpu_bucket(
    names: Sequence[str], state: Mapping[str, Tensor], gpus: Sequence[int]
) -> Bucket:
    """Copy these tensors into a bucket on each GPU: from the host once, then between GPUs."""
    entries, size_bytes = lay_out_bucket(names, describe_tensors(state))
    try:
        first = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{gpus[0]}")
        _fill(first, entries, state)
        copies = [first, *(first.to(f"cuda:{gpu}") for gpu in gpus[1:])]
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
    except (RuntimeError, AssertionError) as error:  # torch's errors of a GPU or without CUDA
        raise CannotShare(f"a bucket of {size_bytes >> 20} MiB on a GPU: {error}") from error
    return Bucket(copies, entries)


def free_gpu_memory() -> None:
    """Return memory of released buckets to the GPUs."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def lay_out_bucket(
    names: Sequence[str], meta_tensors: Mapping[str, Tensor]
) -> tuple[list[SimpleNamespace], int]:
    """Return the place of each tensor in a bucket, and the size of the bucket in bytes."""
    entries, end = [], 0
    for name in names:
        tensor = meta_tensors[name]
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + count_bytes(tensor)
        entries.append(
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
    return entries, end


def _fill(flat: Tensor, entries: Sequence[SimpleNamespace], state: Mapping[str, Tensor]) -> None:
    for entry in entries:
        target = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
        target.copy_(state[entry.name])


class _GpuHandle:
    """Handle of GPU memory, as SGLang writes it: the GPU by its UUID.

    The server may number the GPUs differently.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        gpu = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], gpu, *arguments[DEVICE_ARGUMENT + 1 :])


def _pickle_handle(flat: Tensor, entries: Sequence[SimpleNamespace]) -> str:
    tensor = _GpuHandle(flat) if flat.device.type == "cuda" else flat
    try:
        return _dump({"flattened_tensor": tensor, "metadata": list(entries)})
    except RuntimeError as error:  # torch's error of memory that cannot be shared
        raise CannotShare(f"a handle of {flat.device} cannot be made: {error}") from error


def _dump(content: dict[str, Any]) -> str:
    stream = io.BytesIO()
    ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()


def pickle_inline(tensors: Mapping[str, Tensor]) -> str:
    """Pickle tensors by name in SGLang's format with their contents; only for small ones."""
    cpu_tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return base64.b64encode(pickle.dumps(cpu_tensors)).decode()
