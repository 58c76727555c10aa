"""Figures of the load test of several jobs."""

from __future__ import annotations

import itertools

import pytest

from loadtests.jobs.mesh import WorkSample, workers_by_job
from loadtests.jobs.sharing import max_min, others_rate, role_changes
from meshrl.common.state.events import Event
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0), (1.0, 1.0, 1.0)])
def test_max_min_split_has_the_best_sorted_levels(shares: tuple[float, ...]) -> None:
    floors, workers = [2] * len(shares), 8
    splits = itertools.product(range(2, workers + 1), repeat=len(shares))
    levels = {
        split: sorted(round(n / share, 9) for n, share in zip(split, shares, strict=True))
        for split in splits
        if sum(split) == workers
    }
    found = tuple(int(n) for n in max_min(workers, floors, shares))
    assert levels[found] == max(levels.values())


def test_shared_worker_counts_for_each_job_in_parts() -> None:
    two = Gang(
        "g0",
        ("w0", "w1"),
        1,
        (
            Instance("g0.0", "a", Role.TRAINING, core=True, ranks=(0, 1)),
            Instance("g0.1", "b", Role.ROLLOUT, ranks=(1,)),
            Instance("g0.2", "a", Role.ROLLOUT, ranks=(1,)),
        ),
    )
    assert workers_by_job([two]) == {"a": 1.5, "b": 0.5}


def desired(ms: int, instance: str, role: str, was: str = "idle") -> Event:
    about = {"gang": instance[:2], "resident": instance, "generation": 1, "epoch": 1}
    return Event(str(ms), ms, "desired", {**about, "role": role, "from_role": was})


def ready(ms: int, instance: str, epoch: int = 1) -> Event:
    about = {"gang": instance[:2], "resident": instance, "generation": 1, "epoch": epoch}
    return Event(str(ms), ms, "actual", {**about, "status": "ready"})


def test_role_change_lasts_from_its_decision_to_ready() -> None:
    story = [
        desired(0, "g0.0", "rollout"),
        ready(3000, "g0.0"),
        desired(10_000, "g0.0", "idle", was="rollout"),  # it leaves, and another one arrives
        desired(10_000, "g0.1", "training"),
        ready(10_200, "g0.0", epoch=0),  # for an older desired state
        ready(10_500, "g0.1"),
        ready(10_600, "g0.1"),  # a repeated report
    ]
    assert role_changes(story) == {"idle rollout": [3.0], "rollout training": [0.5]}


def test_rate_of_others_excludes_moved_and_idle_engines() -> None:
    seen = [WorkSample(at, "engine/g0.0", "j", 0, 10.0 * at, 0) for at in range(0, 11)]
    seen += [
        WorkSample(at, "engine/g0.0", "j", 0, 100 + 5.0 * (at - 10), 0) for at in range(11, 21)
    ]
    seen += [WorkSample(at, "engine/g1.0", "j", 0, 0.0, 0) for at in range(0, 21)]
    seen += [WorkSample(at, "engine/g2.0", "j", 0, 50.0 * at, 0) for at in range(0, 21)]
    rate = others_rate(sorted(seen, key=lambda one: one.at), {"engine/g2.0"}, 10.0, 20.0)
    assert rate == pytest.approx(0.5)
