"""Environment by which a lost member of an NCCL group becomes an error and not the process's end.

A wait for NCCL blocks only a stream, so the host hangs at its next synchronization. PyTorch's
watchdog thread detects the timeout, and by default ends the process. With these values it aborts
the communicators: kernels return, the host continues, and `Backend.get_error` reports the failure.
`TORCH_NCCL_BLOCKING_WAIT` would raise at the wait itself, but without overlap of compute and
collectives. Meanings: `torch/csrc/distributed/c10d/ProcessGroupNCCL.{hpp,cpp}` of torch 2.11 to
2.13, and https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshrl.common.base.errors import ConfigError

ERROR_HANDLING, BLOCKING_WAIT = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
DUMP, DUMP_WAIT = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
CLEAN_UP_ONLY = "2"  # the watchdog aborts communicators, and leaves the process
VALUES = {
    ERROR_HANDLING: CLEAN_UP_ONLY,
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a second thread that ends the process after a dump
    DUMP: "0",
    DUMP_WAIT: "0",  # the watchdog waits four times as long before it aborts
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the host receives a CUDA error, not the watchdog
    # Operations of several communicators run in the order of their launches (NCCL 2.26 and newer):
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
_TRUE = ("1", "Y", "YES", "T", "TRUE", "ON")


def complete_nccl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `environment` lacks; its own values stay.

    ConfigError for a value by which a lost member ends or blocks the others.
    """
    handling = environment.get(ERROR_HANDLING, CLEAN_UP_ONLY)
    if handling != CLEAN_UP_ONLY and not _is_set(environment, BLOCKING_WAIT):
        then = "never end their wait" if handling == "0" else "are ended by PyTorch's watchdog"
        raise ConfigError(
            f"{ERROR_HANDLING}={handling}: when one rank is lost, the others {then}",
            where=ERROR_HANDLING,
            fix=f"Remove it (MeshRL sets {CLEAN_UP_ONLY}), or set {BLOCKING_WAIT}=1 beside it",
        )
    missing = {name: value for name, value in VALUES.items() if name not in environment}
    if _is_set(environment, DUMP):
        missing.pop(DUMP_WAIT, None)  # a dump takes time
    return missing


def set_nccl_environment() -> None:
    """Complete this process's environment, which each new NCCL group reads. ConfigError."""
    os.environ.update(complete_nccl_environment(os.environ))


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").upper() in _TRUE
