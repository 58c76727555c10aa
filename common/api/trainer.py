"""Interface of a training gang's core for its hybrids.

Hybrids lease rounds and return the sums of their gradients.
"""

from __future__ import annotations

from dataclasses import field
from types import NoneType
from typing import Any

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.calls.role import RoleControl
from meshrl.common.base.encoding.messages import Array, message


@message
class LeaveRequest:
    """Report of a hybrid that it computes no more rounds."""

    instance: str
    generation: int


@message
class RoundRequest:
    """Request of a hybrid for a round to compute."""

    instance: str
    generation: int
    manifest: str  # digest of the hybrid's weights
    wait_s: float  # how long the core may delay an empty answer
    update_id: str = ""  # of the blocks below
    block: int = -1  # of rounds, which the hybrid sums; -1: none
    rounds_done: int = 0  # of that block
    sent_block: int = -1  # another block, whose sum it sends; -1: none


@message
class RoundLease:
    """Round to compute, as the next one of a block.

    `index` = -1: there is none for these weights; if `manifest` names others, rounds will need
    them.
    """

    update_id: str  # of the update that the round belongs to
    index: int
    manifest: str  # digest of the weights of the round
    bins: list[dict[str, Array]]
    block: int = -1  # the first round of another block than before discards the sum of that one
    rounds_before: int = 0  # of the block
    is_complete: bool = False  # no round of the block follows: send its sum,
    gradient_dtype: str = "float32"  # rounded to this type
    # Rows of each rank in the flat gradient, as int64 pairs of start and end.
    owned_ranges: list[Array] = field(default_factory=list)


@message
class BlockResult:
    """Block of rounds that a hybrid has computed; the ranks fetch their rows during this call."""

    instance: str
    generation: int
    update_id: str
    block: int
    rounds: int
    # Digests of chunks at the hybrid's bulk port, by rank. Decoded and concatenated, they are the
    # rank's rows of the gradient of the sum of the rounds' losses.
    chunks: list[list[str]]
    stats: Any
    busy_s: float
    staged_s: float  # seconds in which the hybrid wrote the chunks


@message
class RestageResult:
    """Answer to Trainer.restage_version.

    With `retry_later` the core is not ready, still writes, or has other weights, and another
    version comes or is there. If neither field is set, the core cannot stage the version.
    """

    is_done: bool
    retry_later: bool = False


@message
class BroadcastRequest:
    """Request of a host for missing chunks of a version, by broadcast with other hosts."""

    manifest: str
    missing: dict[str, int]  # bytes by digest
    has_cuda: bool = False  # it can receive into the memory of its own GPU


@message
class BroadcastSender:
    """Sender of chunks, in this order, in a group of this name, in which it has rank 0."""

    group: str
    chunk_bytes: dict[str, int]  # bytes by digest


@message
class BroadcastPlan:
    """Answer to BroadcastRequest, after a wait for other hosts.

    An empty `rendezvous_url`: there is no broadcast of this version, or one has begun,
    and the host fetches the chunks itself.
    """

    rendezvous_url: str = ""  # see `common/weights/transports/rendezvous.py`
    senders: list[BroadcastSender] = field(default_factory=list)
    rank: int = 0  # of the host in each sender's group
    world_size: int = 0  # of each sender's group
    backend: str = "gloo"
    max_wait_s: float = 0.0  # maximum wait for a member


class Trainer(RoleControl):
    """Methods of the core of a training gang."""

    # An instance joins as a hybrid by its name. The answer is a generation, which all later
    # requests of the hybrid contain: an older one is rejected.
    join_hybrid = Call(str, int, deadline_s=10.0)
    leave_hybrid = Call(LeaveRequest, NoneType, deadline_s=2.0, idempotent=True)
    lease_round = Call(RoundRequest, RoundLease, deadline_s=15.0)
    complete_block = Call(BlockResult, NoneType, deadline_s=30.0)
    # For a version that is corrupt or missing in the store: the core stages it again.
    restage_version = Call(str, RestageResult, deadline_s=300.0, idempotent=True)
    join_broadcast = Call(BroadcastRequest, BroadcastPlan, deadline_s=10.0)
