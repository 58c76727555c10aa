"""Interface of a rollout shard for the core of its job."""

from __future__ import annotations

from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.base.encoding.messages import Array, message


@message
class HeldOutRequest:
    """Request for rows of the held-out set of a supervised job, from the row `start` on."""

    start: int
    count: int


@message
class HeldOutRows:
    """Encoded rows with an answer, one after the other; rows that cannot be learned are left out.

    `next_start` is the row that follows them; -1: they are the last.
    """

    next_start: int
    lengths: Array  # int32 [rows]
    tokens: Array  # int32
    learned: Array  # bool, one per token: its loss counts


class Rollout(Interface):
    """Methods of a rollout shard."""

    encode_held_out = Call(HeldOutRequest, HeldOutRows, deadline_s=60.0, idempotent=True)
