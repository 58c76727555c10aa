"""Gangs that two jobs share under random faults: every invariant holds, and a seed reproduces its
run. 500 seeds: `python -m tests.mesh.simulated.sharing.runner --seeds 0:500 --jobs 2`.
"""

from __future__ import annotations

import pytest

from tests.mesh.simulated.sharing.runner import run_seed

SEEDS = 100


@pytest.mark.timeout(300)
@pytest.mark.rotating(SEEDS)  # one a day
@pytest.mark.parametrize("seed", range(SEEDS))
def test_jobs_on_one_gang_keep_the_invariants_under_random_faults(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.violations, f"{outcome.violations}; again: {outcome.replay_command}"


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_seed_reproduces_a_run_of_a_shared_gang() -> None:
    assert run_seed(3).digest == run_seed(3).digest != run_seed(4).digest
