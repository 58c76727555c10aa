"""Failures of a rank's process groups: recognition of their errors, and of silent failures."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _world


def is_collective_error(error: RuntimeError) -> bool:
    """Return True if a failed collective raised `error`.

    Gloo's errors name its source file. NCCL's are a `DistBackendError`, or a plain error from
    PyTorch's wrappers of point-to-point calls.
    """
    text = str(error)
    return isinstance(error, dist.DistError) or "/gloo/" in text or "NCCL Error" in text


def find_group_failure(groups: Iterable[Any] | None = None) -> str:
    """Return a failure of a process group that raises nothing; empty: none.

    NCCL's watchdog has then aborted the communicators (`nccl_environment.py`): their kernels have
    returned, and results of their collectives are undefined. `groups`: this process's by default.
    """
    for group in list(_world.pg_map) if groups is None else groups:
        with suppress(RuntimeError, AttributeError):  # gloo has no such record, or raises
            found = group._get_backend(torch.device("cuda")).get_error()
            if found != ErrorType.SUCCESS:
                return f"NCCL's watchdog reports {found.name}"
    return ""
