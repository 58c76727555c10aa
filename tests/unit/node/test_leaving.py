"""Time in which the work of a role process may leave a host whose end is announced."""

from __future__ import annotations

import pytest

from meshrl.common.state.pool.store.host_notices import UNKNOWN_TIME
from meshrl.services.node.instances.role_process import (
    DRAIN_S,
    GRACE_S,
    MAX_LEAVE_S,
    UNKNOWN_END_S,
    compute_leave_s,
)

NOW_S = 1_800_000_000.0
END_S = DRAIN_S + GRACE_S  # of the drain's other work, and of the process


@pytest.mark.parametrize(
    ("end_s", "expected"),
    [
        (None, 0.0),
        (UNKNOWN_TIME, UNKNOWN_END_S - END_S),
        (NOW_S - 5.0, 0.0),
        (NOW_S + END_S, 0.0),
        (NOW_S + 90.0, 90.0 - END_S),
        (NOW_S + 3600.0, MAX_LEAVE_S),
    ],
)
def test_work_leaves_until_shortly_before_the_announced_end(
    end_s: float | None, expected: float
) -> None:
    assert compute_leave_s(end_s, NOW_S) == expected
