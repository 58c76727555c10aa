"""What the core of a training gang offers to its hybrids: rounds to lease, and a place for their
gradients.
"""

from __future__ import annotations

from typing import Any

from common.api.role import Role
from common.interface import Call
from common.wire import Array, message


@message
class BinRequest:
    gang: str
    wait_s: float  # how long the core may hold the call while it has no bin


@message
class BinLease:
    """A round to compute, or `index` = -1: none came in time."""

    step: int
    version: int
    epoch: str  # the core's incarnation
    index: int
    manifest: str  # digest of the weights to compute it with
    bins: list[dict[str, Array]]


@message
class BinResult:
    gang: str
    step: int
    version: int
    epoch: str
    index: int
    manifest: str
    gradient: Array  # float32, of the sum over the round's losses, in the order of parameters
    stats: Any
    busy_s: float


@message
class BinTaken:
    counted: bool  # False: the step has moved on, or another result came first


class Trainer(Role):
    lease_bin = Call(BinRequest, BinLease, deadline_s=15.0)
    bin_done = Call(BinResult, BinTaken, deadline_s=30.0)
