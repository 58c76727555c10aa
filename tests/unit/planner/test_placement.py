"""Placement decisions, one at a time, until nothing is left to put right."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.state.gangs import Gang
from services.planner.placement import RoleDecision, gang_to_move, next_decision, shortage


def gang(number: int, role: str = "idle", core: bool = False, actual: str = "ready") -> Gang:
    return Gang(
        id=f"g{number}",
        workers=[f"worker/g{number}"],
        accelerator="cpu",
        desired_role=role,
        desired_job="" if role == "idle" else "job",
        desired_core=core,
        epoch=1,
        actual_role=role,
        actual_state=actual,
        actual_epoch=1,
        changed_ms=0,
        pinned=False,
    )


def settle(
    gangs: list[Gang], job: str, training: int, scoring: bool = False
) -> tuple[list[Gang], list[RoleDecision]]:
    made: list[RoleDecision] = []
    while (decision := next_decision(gangs, job, training, scoring)) is not None:
        made.append(decision)
        assert len(made) < 50
        gangs = [
            replace(
                g,
                desired_role=decision.role,
                desired_core=decision.core,
                desired_job="" if decision.role == "idle" else job,
            )
            if g.id == decision.gang
            else g
            for g in gangs
        ]
    return gangs, made


def test_the_default_split_is_one_core_and_the_rest_rolls_out() -> None:
    gangs, _ = settle([gang(i) for i in range(3)], "job", 1)
    assert [g.desired_role for g in gangs] == ["training", "rollout", "rollout"]
    assert [g.desired_core for g in gangs] == [True, False, False]


def test_a_lost_core_is_replaced_by_a_hybrid_first() -> None:
    gangs = [
        gang(0, "training", core=True, actual="lost"),
        gang(1, "rollout"),
        gang(2, "training"),
    ]
    _, made = settle(gangs, "job", 1)
    assert made == [RoleDecision("g2", "training", True, "repair")]


def test_a_lost_core_is_replaced_by_what_is_missed_least() -> None:
    roles = ["scoring", "rollout", "rollout", "idle", "training"]
    gangs = [gang(i, role) for i, role in enumerate(roles)]
    chosen = []
    while gangs:
        decision = next_decision(gangs, "job", 1, scoring=True)
        assert decision is not None and decision.core
        chosen.append(next(g.desired_role for g in gangs if g.id == decision.gang))
        gangs = [g for g in gangs if g.id != decision.gang]
    assert chosen == ["training", "idle", "rollout", "scoring", "rollout"]


def test_training_gives_a_hybrid_back_when_nobody_rolls_out() -> None:
    gangs = [
        gang(0, "training", core=True),
        gang(1, "rollout", actual="lost"),
        gang(2, "training"),
    ]
    _, made = settle(gangs, "job", 1)
    assert made == [RoleDecision("g2", "rollout", False, "repair")]


def test_without_a_job_every_gang_is_released() -> None:
    gangs, _ = settle([gang(0, "training", core=True), gang(1, "rollout")], "", 1)
    assert {g.desired_role for g in gangs} == {"idle"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["idle", "rollout", "training", "scoring"]),
            st.booleans(),
            st.sampled_from(["ready", "lost"]),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_any_state_settles_with_exactly_one_core(
    states: list[tuple[str, bool, str]], scoring: bool
) -> None:
    gangs = [
        gang(i, role, core and role == "training", actual)
        for i, (role, core, actual) in enumerate(states)
    ]
    gangs, _ = settle(gangs, "job", 1, scoring)
    usable = [g for g in gangs if g.actual_state != "lost"]
    hosts = sum(g.desired_role == "scoring" for g in usable)
    if usable:
        assert sum(g.desired_core for g in usable) == 1
    if not shortage(usable, 1, True, scoring):
        assert any(g.desired_role == "rollout" for g in usable)
        assert hosts == scoring
    assert hosts <= scoring


def test_one_gang_hosts_the_frozen_models_of_a_job_that_has_some() -> None:
    gangs, _ = settle([gang(i) for i in range(4)], "job", 1, scoring=True)
    assert [g.desired_role for g in gangs] == ["training", "scoring", "rollout", "rollout"]


def test_a_lost_host_of_frozen_models_is_replaced_and_not_taken_back() -> None:
    lost = gang(1, "scoring", actual="lost")
    gangs = [gang(0, "training", core=True), lost, gang(2, "rollout"), gang(3, "rollout")]
    gangs, made = settle(gangs, "job", 1, scoring=True)
    assert made == [RoleDecision("g3", "scoring", False, "repair")]
    back = [replace(g, actual_state="ready") for g in gangs]
    back, made = settle(back, "job", 1, scoring=True)
    assert [g.desired_role for g in back].count("scoring") == 1
    assert {g.desired_role for g in back} == {"training", "scoring", "rollout"}


def test_the_last_engine_goes_on_rolling_out_without_a_host_of_frozen_models() -> None:
    gangs = [gang(0, "training", core=True), gang(1, "rollout")]
    _, made = settle(gangs, "job", 1, scoring=True)
    assert made == []


def test_a_mesh_too_small_for_a_job_says_how_large_it_must_be() -> None:
    two = [gang(0), gang(1)]
    assert shortage(two, 1, True, False) == ""
    assert shortage(two, 1, False, True) == ""
    why = shortage(two, 1, True, True)
    assert "this mesh has 2" in why and "`meshrl up --workers 3`" in why
    assert "`meshrl up --workers 2`" in shortage(two[:1], 1, True, False)
    assert "this mesh has 0" in shortage([], 2, True, False)


def test_a_pinned_gang_or_a_core_is_not_moved() -> None:
    pinned = replace(gang(2, "rollout"), pinned=True)
    gangs = [gang(0, "training", core=True), gang(1, "rollout"), pinned]
    found = gang_to_move(gangs, "training")
    assert found is not None and found.id == "g1"
    assert gang_to_move(gangs, "rollout") is None
