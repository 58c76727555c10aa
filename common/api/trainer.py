"""The interface of a training gang's core towards its hybrids, the helpers that lend it gradients:
they lease rounds and hand in what they computed.
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
    """A hybrid says that it computes no more rounds."""

    instance: str
    generation: int


@message
class RoundRequest:
    """A hybrid asks for a round to compute."""

    instance: str
    generation: int
    manifest: str  # digest of the weights that the hybrid has
    wait_s: float  # how long the core may hold the call while there is nothing to say


@message
class RoundLease:
    """A round to compute. `index` = -1: there is none for these weights; if `manifest` names
    others, rounds will need them.
    """

    update_id: str  # the update that the round belongs to
    index: int
    manifest: str  # digest of the weights to compute it with
    bins: list[dict[str, Array]]


@message
class RoundResult:
    """A hybrid has computed a round; the core fetches the gradient while this call lasts."""

    instance: str
    generation: int
    update_id: str
    index: int
    chunks: list[str]  # digests of chunks at the hybrid's bulk port: end to end, float32 numbers,
    # the gradient of the sum over the round's losses in the order of parameters
    stats: Any
    busy_s: float


@message
class RestageResult:
    """The answer to Trainer.restage_version. Not `done` and `later`: the core is not there yet, or
    still
    writes, or has other weights by now, and another version comes or is there. Neither: it cannot.
    """

    is_done: bool
    retry_later: bool = False


@message
class BroadcastRequest:
    """A host lacks chunks of a version, and would take them by broadcast, together with others."""

    manifest: str
    missing: dict[str, int]  # bytes by digest
    has_cuda: bool = False  # it can receive into the memory of a GPU of its own


@message
class BroadcastSender:
    """One who sends chunks, in this order, in a group of this name, of which it is rank 0."""

    name: str
    chunks: dict[str, int]  # bytes by digest


@message
class BroadcastPlan:
    """The answer to Gather, once others have had time to come: where all meet. Nowhere: there is no
    broadcast of this version, or one has begun, and who asks is to fetch it by itself.
    """

    where: str = ""  # see `common/weights/transports/rendezvous.py`
    senders: list[BroadcastSender] = field(default_factory=list)
    rank: int = 0  # in each sender's group
    members: int = 0  # of each
    backend: str = "gloo"
    wait_s: float = 0.0  # that one may keep the others waiting


class Trainer(RoleControl):
    """The methods of the core of a training gang."""

    # A resident asks by its name to be a hybrid; the answer is a generation, which all that the
    # hybrid asks from then on carries: an older one is refused.
    join_hybrid = Call(str, int, deadline_s=10.0)
    leave_hybrid = Call(LeaveRequest, NoneType, deadline_s=2.0, idempotent=True)
    lease_round = Call(RoundRequest, RoundLease, deadline_s=15.0)
    complete_round = Call(RoundResult, NoneType, deadline_s=30.0)
    # Of a version that the store does not hold as it was written: the core is to write it again.
    restage_version = Call(str, RestageResult, deadline_s=300.0, idempotent=True)
    join_broadcast = Call(BroadcastRequest, BroadcastPlan, deadline_s=10.0)
