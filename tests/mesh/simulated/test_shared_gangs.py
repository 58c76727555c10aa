"""Gangs that two jobs share under random and planned faults: every invariant holds, and a seed
reproduces its run.

500 seeds: `python -m tests.mesh.simulated.sharing.runner --seeds 0:500 --jobs 2`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.mesh.simulated.sharing.runner import run_seed

# The leader exits, or hangs, in mid-switch while it moves a job; its standby decides on.
CHANGES_OF_PLANNER = [
    (first, f"{action} in move of planner", second, "kill in move of planner")
    for first, second in (("apart", "together"), ("together", "apart"))
    for action in ("kill", "hang")
]
CASES: list[tuple[int, Sequence[str]]] = [
    *((seed, ()) for seed in range(100)),
    *((seed, CHANGES_OF_PLANNER[seed % len(CHANGES_OF_PLANNER)]) for seed in range(8)),
]


@pytest.mark.timeout(300)
@pytest.mark.rotating(len(CASES))  # one a day
@pytest.mark.parametrize(
    ("seed", "planned"),
    CASES,
    ids=lambda it: str(it) if isinstance(it, int) else ",".join(it) or "drawn",
)
def test_jobs_on_one_gang_keep_the_invariants_under_faults(
    seed: int, planned: Sequence[str]
) -> None:
    outcome = run_seed(seed, planned=planned)
    assert not outcome.violations, f"{outcome.violations}; again: {outcome.replay_command}"


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_seed_reproduces_a_run_of_a_shared_gang() -> None:
    assert run_seed(3).digest == run_seed(3).digest != run_seed(4).digest
