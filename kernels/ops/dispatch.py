"""Dispatch of the operators to the implementation of the tensors' device, else to the reference."""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from meshrl.kernels.backends import native, reference
from meshrl.kernels.backends.kernel_unsupported import KernelUnsupported


def register_operator(
    make_fake_output: Callable[..., Tensor] | None = None, mutated_arguments: Iterable[str] = ()
) -> Callable[[Callable[..., None]], CustomOpDef]:
    """Register a function that checks arguments (ValueError if they do not fit) as an operator.

    The operator runs the implementation of the function's name: native.py's for CPU tensors,
    cuda.py's for CUDA tensors (imported at first use), reference.py's if these raise
    KernelUnsupported. `make_fake_output` returns an empty output; an operator without it returns
    nothing, and mutates its `mutated_arguments`.
    """

    def decorate(check: Callable[..., None]) -> CustomOpDef:
        name = check.__name__
        plain = getattr(reference, name)

        def on(backend: Callable[[], ModuleType], device: str) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                check(*arguments)
                try:
                    return getattr(backend(), name)(*arguments)
                except KernelUnsupported as declined:
                    if declined.reason:
                        log_fallback_once(device, declined.reason)
                    return plain(*arguments)

            return run

        @wraps(check)
        def anywhere(*arguments: Any) -> Any:
            check(*arguments)
            return plain(*arguments)

        def described(*arguments: Any) -> Any:
            check(*arguments)
            return make_fake_output(*arguments) if make_fake_output is not None else None

        result = Tensor if make_fake_output is not None else None
        signature = inspect.signature(check).replace(return_annotation=result)
        anywhere.__signature__ = signature  # type: ignore[attr-defined]
        custom_op = torch.library.custom_op(
            f"meshrl::{name}", anywhere, mutates_args=mutated_arguments
        )
        custom_op.register_fake(described)
        custom_op.register_kernel("cpu", on(lambda: native, "cpu"))
        custom_op.register_kernel("cuda", on(_import_cuda_backend, "cuda"))
        return custom_op

    return decorate


def can_capture_cuda_graph() -> bool:
    """Return True if a CUDA graph can capture a decode step: the references wait for the GPU."""
    return not isinstance(_import_cuda_backend().build_library(), str)


def _import_cuda_backend() -> ModuleType:
    from meshrl.kernels.backends import cuda

    return cuda


@cache
def log_fallback_once(device: str, reason: str) -> None:
    """Log one line for each device and reason of this process."""
    logging.getLogger(__name__).warning(
        "operators run as plain PyTorch on %s, several times slower: %s", device, reason
    )
