"""Many seeds of a whole mesh under drawn faults: every invariant holds after each of them."""

from __future__ import annotations

import pytest

from meshrl.sim.mesh.running import MeshPlan, play

FAULTS = "all"
SEEDS = 100
PARTS = 5  # of the seeds; a day has one
HOURS = 18 / 3600  # of faults; a run takes a minute of virtual time in all
# Redis' clock goes back under the lease of an engine that the power took: the lease outlasts a mesh
# that fails at once.
CLOCK = 30
PACE = 0.5  # several kinds of faults in each of them


@pytest.mark.timeout(300)
@pytest.mark.rotating(PARTS)
@pytest.mark.parametrize("seed", [SEEDS if seed == CLOCK else seed for seed in range(SEEDS)])
def test_nothing_is_lost_whatever_fails(seed: int) -> None:
    budget = 2 if 50 <= seed < SEEDS else 1
    plan = MeshPlan(seed, FAULTS, HOURS, pace=PACE, budget=budget)
    outcome = play(plan)
    assert not outcome.violations, f"{outcome.violations}; again: {plan.command}"


@pytest.mark.rotating(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("workers", "shards", "ranks"), [(4, 2, 1), (3, 1, 2)])
def test_nothing_is_lost_in_larger_meshes(workers: int, shards: int, ranks: int) -> None:
    plan = MeshPlan(7, FAULTS, 30 / 3600, workers, shards, ranks)
    outcome = play(plan)
    assert not outcome.violations, f"{outcome.violations}; again: {plan.command}"
