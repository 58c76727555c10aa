"""Policies of time slices by their names in `pool.slice_policy`."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.services.node.slices.exhaustive import Exhaustive
from meshrl.services.node.slices.fifo import Fifo
from meshrl.services.node.slices.hrrs import HighestResponseRatio
from meshrl.services.node.slices.round_robin import RoundRobin
from meshrl.services.node.slices.slice_policy import SlicePolicy

DEFAULT_POLICY = "hrrs"
POLICIES: Mapping[str, SlicePolicy] = {
    policy.name: policy for policy in (HighestResponseRatio(), Fifo(), RoundRobin(), Exhaustive())
}
