"""The bytes that residents take of a worker."""

from __future__ import annotations

from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.placing.fitting import sleeps, takes
from meshrl.common.state.pool.workers.rows import Resident, Role


def test_a_core_whose_experts_lie_apart_is_not_refused_for_a_part_that_nobody_knows() -> None:
    alike, apart = Need(ranks=4, bytes=1000), Need(ranks=4, attention=2, bytes=1000)
    assert takes(Role.TRAINING, True, 4, alike) == 1000  # weights, gradients and two moments
    assert takes(Role.TRAINING, True, 4, apart) == 0
    assert takes(Role.TRAINING, False, 1, apart) == takes(Role.TRAINING, False, 1, alike) == 2000
    core = Resident("g0.0", "j", Role.TRAINING, core=True, ranks=(0, 1, 2, 3))
    assert (sleeps(core, alike), sleeps(core, apart)) == (750, 1500)
