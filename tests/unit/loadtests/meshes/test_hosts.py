"""Figures from snapshots of a mesh over several hosts."""

from __future__ import annotations

from typing import Any

from loadtests.hosts.__main__ import result
from loadtests.hosts.arms import named_s
from loadtests.hosts.eye import HostsSnapshot
from loadtests.hosts.mesh import HostsMesh
from loadtests.measuring.rounds import Arm
from loadtests.namespaces.hosts import Hosts

SOUND: Arm = {"valid": 1, "late_share": 0.0, "host_cores": 1.0, "steal_cores": 0.0, "load": 1.0}
BOOKS: Arm = {"lost": 0, "trained_twice": 0, "typed_drops": 0, "host_lost": 0, "hosts_lost": 0}


def make_snapshot(
    at: float, *stalls: tuple[str, float], leader: str = "planner/0", token: int = 1
) -> HostsSnapshot:
    found: list[dict[str, Any]] = [{"host": host, "since_s": since_s} for host, since_s in stalls]
    return HostsSnapshot(at, [], [], {}, leader, token, found)


def make_observer(*looks: HostsSnapshot) -> HostsMesh:
    mesh = HostsMesh(Hosts(3))
    mesh.names = {0: "a", 1: "b", 2: "c"}
    mesh.seen = list(looks)
    return mesh


def test_partitioned_host_is_named_by_a_stall_that_began_with_the_cut() -> None:
    mesh = make_observer(
        make_snapshot(101, ("b", 40.0)),
        make_snapshot(104, ("c", 2.0)),
        make_snapshot(105, ("b", 5.0)),
    )
    assert named_s(mesh, 0, 100.0, 1) == 5.0
    assert named_s(mesh, 0, 100.0, 0) == 4.0, "of the head's cut any other host's process tells"
    assert named_s(make_observer(make_snapshot(130, ("b", 50.0))), 0, 100.0, 1) is None


def test_two_leaders_with_one_token_are_detected() -> None:
    mesh = make_observer(
        make_snapshot(1),
        make_snapshot(2, leader="planner/1", token=2),
        make_snapshot(3, leader="planner/2"),
    )
    assert mesh.leaders() == {1: {"planner/0", "planner/2"}, 2: {"planner/1"}}


def test_result_is_good_only_on_a_quiet_host_within_all_bounds() -> None:
    three, one = SOUND | BOOKS | {"took_s": 120.0}, SOUND | BOOKS | {"took_s": 100.0}
    good = result({"three": [three], "one": [one]})
    assert (good["ratio_one_host"], good["ok"]) == (1.2, 1)
    assert result({"three": [three | {"took_s": 126.0}], "one": [one]})["ok"] == 0
    assert result({"three": [three | {"valid": 0}], "one": [one]})["ok"] == 0
    assert result({"three": [three | {"lost": 1}], "one": [one]})["ok"] == 0
    cut = SOUND | BOOKS | {"stall_named_s": None, "leaders_per_token": 1}
    assert result({"partitions": [cut]})["ok"] == 0
