"""A core with several ranks takes a gang of as many workers; the other roles take single ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.state.gangs import Gang
from services.planner.placement import RoleDecision, gang_to_move, next_decision, shortage


def gang(number: int, size: int = 1, role: str = "idle", core: bool = False) -> Gang:
    return Gang(
        id=f"g{number}",
        workers=[f"worker/g{number}.{rank}" for rank in range(size)],
        accelerator="cpu",
        desired_role=role,
        desired_job="" if role == "idle" else "job",
        desired_core=core,
        epoch=1,
        actual_role=role,
        actual_state="ready",
        actual_epoch=1,
        changed_ms=0,
        pinned=False,
        size=size,
    )


def settle(
    gangs: list[Gang], ranks: int, training: int = 1
) -> tuple[list[Gang], list[RoleDecision]]:
    made: list[RoleDecision] = []
    while (decision := next_decision(gangs, "job", training, ranks=ranks)) is not None:
        made.append(decision)
        assert len(made) < 50
        job = "" if decision.role == "idle" else "job"
        gangs = [
            replace(g, desired_role=decision.role, desired_core=decision.core, desired_job=job)
            if g.id == decision.gang
            else g
            for g in gangs
        ]
    return gangs, made


def test_the_core_takes_the_gang_of_its_size_and_the_others_roll_out() -> None:
    gangs, _ = settle([gang(0), gang(1, size=2), gang(2)], ranks=2)
    assert [(g.desired_role, g.desired_core) for g in gangs] == [
        ("rollout", False),
        ("training", True),
        ("rollout", False),
    ]


def test_a_core_waits_for_all_workers_of_its_gang() -> None:
    half = replace(gang(0, size=2), workers=["worker/g0"])
    gangs, _ = settle([half, gang(1)], ranks=2)
    assert not any(g.desired_core for g in gangs)
    gangs, _ = settle([gang(0, size=2), gangs[1]], ranks=2)
    assert gangs[0].desired_core


def test_a_lost_core_is_replaced_by_a_gang_of_its_size_and_by_no_other() -> None:
    lost = replace(gang(0, size=2, role="training", core=True), actual_state="lost")
    hybrid = gang(1, role="training")
    gangs, made = settle([lost, hybrid, gang(2, role="rollout"), gang(3, size=2)], ranks=2)
    assert made == [RoleDecision("g3", "training", True, "repair")]
    back = [replace(g, actual_state="ready") for g in gangs]
    _, made = settle(back, ranks=2)
    assert made == [RoleDecision("g3", "idle", False, "repair")], "one core, and it is no hybrid"


def test_a_gang_of_several_workers_without_a_core_to_be_is_idle() -> None:
    gangs, _ = settle([gang(0, size=2), gang(1), gang(2)], ranks=1)
    assert gangs[0].desired_role == "idle" and gangs[1].desired_core


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from(["idle", "rollout", "training"]),
            st.booleans(),
            st.sampled_from(["ready", "lost"]),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.integers(1, 3),
)
def test_any_state_settles_with_roles_on_gangs_of_their_size(
    states: list[tuple[int, str, bool, str, bool]], ranks: int
) -> None:
    gangs = [
        replace(
            gang(i, size, role, core and role == "training"),
            actual_state=actual,
            workers=[f"worker/g{i}"] * (size if whole else size - 1),
        )
        for i, (size, role, core, actual, whole) in enumerate(states)
    ]
    gangs, _ = settle(gangs, ranks)
    usable = [g for g in gangs if g.actual_state != "lost" and g.whole]
    cores = [g for g in usable if g.desired_core]
    assert len(cores) == any(g.size == ranks for g in usable)
    assert all(g.size == ranks for g in cores)
    assert all(g.size == 1 for g in usable if g.desired_role != "idle" and not g.desired_core)


def test_a_core_of_several_leaves_workers_for_the_other_roles_or_the_job_cannot_run() -> None:
    pair, alone = gang(0, size=2), [gang(1), gang(2)]
    assert shortage([pair, *alone], 2, True, True) == ""
    why = shortage([pair, alone[0]], 2, True, True)
    assert "this mesh has 1" in why and "`meshrl up --workers 4 --ranks 2`" in why
    assert "`meshrl up --ranks 2`" in shortage(alone, 2, True, False)


def test_only_gangs_of_one_worker_are_moved() -> None:
    gangs = [gang(0, size=2, role="training", core=True), gang(1, role="rollout"), gang(2, size=2)]
    moved = gang_to_move(gangs, "training")
    assert moved is not None and moved.id == "g1"
