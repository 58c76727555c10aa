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


@message
class MoveKinds:
    """Order of a worker to its role process to move kinds that it does not compute with.

    Copies are verified. A copy that exists at the tier stays whole until the new one is complete.
    A repeated order changes nothing; Fenced: a later order has come; StorageFull: no space.
    """

    order: int  # number, which increases with each order of the worker to this process
    # load: to the accelerator from the best copy; offload: to `tier`, then free the accelerator;
    # write_back: copy what is dirty to `tier`, and keep both; drop: free what can be rebuilt
    action: str
    kinds: list[str]  # of `meshrl.common.state.pool.workers.rows.TensorKind`
    tier: str  # memory | disk; empty for load and drop


@message
class KindState:
    """State of one kind of a process's tensors."""

    kind: str
    size_bytes: int  # when on the accelerator
    accelerator_bytes: int  # now
    memory_bytes: int  # of its copy there
    disk_bytes: int  # of its copy there
    is_dirty: bool  # True: no copy equals the tensors on the accelerator
    can_drop: bool  # True: the process rebuilds it without a copy


@message
class KindStates:
    """Answer to MoveKinds: the state of every kind that the process has."""

    kinds: list[KindState]


class RoleControl(Interface):
    """The methods that every role process has."""

    # The process finishes what it can within the deadline and requeues the rest. The argument is
    # the reason for the log. After the answer the process may be stopped.
    drain = Call(str, NoneType, deadline_s=5.0, idempotent=True)
    set_tier = Call(SetTier, TierUsage, deadline_s=SET_TIER_TIMEOUT_S, idempotent=True)
    move_kinds = Call(MoveKinds, KindStates, deadline_s=SET_TIER_TIMEOUT_S, idempotent=True)
    # Cancels an order between two chunks; each kind is then where it was before, or where it goes.
    cancel_move = Call(int, KindStates, deadline_s=30.0, idempotent=True)
    describe_kinds = Call(NoneType, KindStates, deadline_s=10.0, idempotent=True)
    # Unmaps and unpins a memory segment that the worker has freed, by its inode.
    unmap_segment = Call(int, NoneType, deadline_s=2.0, idempotent=True)
