"""Dispatch of the operators: the implementation of the tensors' device runs, else the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import structlog
from torch._library.custom_ops import CustomOpDef

from kernels.backends import native, reference
from kernels.backends.declined import Declined


def offer(operator: CustomOpDef, check: Callable[..., None], fake: Callable[..., Any]) -> None:
    """Registers what other modules call by the operator's name: native.py for CPU tensors, cuda.py
    for CUDA tensors (imported when the first comes), reference.py wherever these decline.

    `check` raises ValueError for shapes and types that do not fit; `fake` answers an empty output.
    """
    name = operator._name
    plain = getattr(reference, name)

    def described(*arguments: Any) -> Any:
        check(*arguments)
        return fake(*arguments)

    def on(backend: Callable[[], ModuleType], device: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            check(*arguments)
            try:
                return getattr(backend(), name)(*arguments)
            except Declined as declined:
                if declined.reason:
                    notice(device, declined.reason)
                return plain(*arguments)

        return run

    operator.register_fake(described)
    operator.register_kernel("cpu", on(lambda: native, "cpu"))
    operator.register_kernel("cuda", on(_cuda, "cuda"))


def can_be_captured() -> bool:
    """Whether a CUDA graph may hold a decode step: the plain references wait for the GPU."""
    return not isinstance(_cuda().built(), str)


def _cuda() -> ModuleType:
    from kernels.backends import cuda

    return cuda


@cache
def notice(device: str, reason: str) -> None:
    """Logs one line for each device and reason of this process."""
    structlog.get_logger().warning(
        "operators run as plain PyTorch, several times slower", device=device, reason=reason
    )
