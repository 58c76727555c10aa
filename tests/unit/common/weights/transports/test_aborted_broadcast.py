"""Broadcast group whose NCCL operation was aborted: its wait ends without an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.common.api.trainer import BroadcastPlan, BroadcastSender
from meshrl.common.base.errors import PeerLost
from meshrl.common.weights.transports.collective import BroadcastGroup

SENDER = BroadcastSender("group", {"digest": 4})


class AbortedGroup(BroadcastGroup):
    """Member that is stopped while it waits for a broadcast."""

    def join(self, store: Any) -> None:
        work = SimpleNamespace(wait=lambda _: self.stop())
        self._group = SimpleNamespace(broadcast=lambda *_: work, abort=lambda: None)


def test_aborted_broadcast_yields_no_content() -> None:
    plan = BroadcastPlan("tcp://127.0.0.1:1/word", [SENDER], world_size=2, max_wait_s=1.0)
    member = AbortedGroup(plan, SENDER, {"interface": "lo"})
    member.join(None)
    with pytest.raises(PeerLost, match="stopped"):
        list(member.receive([4]))
