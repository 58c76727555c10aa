"""The interface of every role process towards the worker that started it: it drains, and it goes
from tier to tier and back.
"""

from __future__ import annotations

from types import NoneType

from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.base.encoding.messages import message

SET_TIER_TIMEOUT_S = (
    900.0  # tensors of some 100 GB to a disk; who asked may ask again, and finds it under way
)


@message
class SetTier:
    """Asks a role process to bring its tensors to a tier, and to stay there until it hears again.

    The same wish twice changes nothing. Fenced: a later one has come. Anything else that is raised
    leaves the process where it was (StorageFull: there is no room; Refused: not now).
    """

    # of `meshrl.common.state.pool.workers.rows.Tier`; absent: a checkpoint covers all, and it may
    # be ended
    tier: str
    epoch: int  # of the wish
    time_sliced: bool  # whether it takes turns with others of its gang while it computes
    segment_owner: str  # the process that owns segments of memory for it: its worker
    offload_dir: str  # the directory where its files may lie, which is the worker's too


@message
class TierUsage:
    """The answer to Settle: bytes of tensors that the process has of each now."""

    accelerator_bytes: int
    memory_bytes: int
    disk_bytes: int


class RoleControl(Interface):
    """The methods that every role process has."""

    # It finishes what it can within the deadline and gives back the rest; the reason is for the
    # log. Once it has answered it may be ended.
    drain = Call(str, NoneType, deadline_s=5.0, idempotent=True)
    set_tier = Call(SetTier, TierUsage, deadline_s=SET_TIER_TIMEOUT_S, idempotent=True)
