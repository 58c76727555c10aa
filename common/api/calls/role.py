"""Interface of every role process for its worker: drain, and change of tier."""

from __future__ import annotations

from types import NoneType

from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.base.encoding.messages import message

# offloads about 100 GB to a disk; a repeated order joins the one in progress
SET_TIER_TIMEOUT_S = 900.0


@message
class SetTier:
    """Order to move a role process's tensors to a tier.

    A repeated order changes nothing. Fenced: a later order has come. Any other error leaves the
    process in its tier (StorageFull: no space; Refused: not now).
    """

    # of `meshrl.common.state.pool.workers.rows.Tier`; absent: a checkpoint covers all state, and
    # the process may be stopped
    tier: str
    epoch: int  # of the desired state
    time_sliced: bool  # True: it computes in time slices with others of its gang
    segment_owner: str  # owner of its memory segments: its worker
    offload_dir: str  # directory for its files, shared with the worker


@message
class TierUsage:
    """Answer to SetTier: bytes of the process's tensors in each tier."""

    accelerator_bytes: int
    memory_bytes: int
    disk_bytes: int


class RoleControl(Interface):
    """The methods that every role process has."""

    # The process finishes what it can within the deadline and requeues the rest. The argument is
    # the reason for the log. After the answer the process may be stopped.
    drain = Call(str, NoneType, deadline_s=5.0, idempotent=True)
    set_tier = Call(SetTier, TierUsage, deadline_s=SET_TIER_TIMEOUT_S, idempotent=True)
