"""What people ask for: granted, or declined with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.state.pool.placing.decisions import Decline
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from tests.unit.planner.plant import Plant, run
from tests.unit.planner.pools import Looks, begun, job


def ask(looks: Looks, **about: Any) -> list[str]:
    """What comes of a request, at the looks until all is at rest; reasons of refusals."""
    looks.change(requests=(PoolRequest("op", about.pop("kind", "move"), **about),))
    return [d.reason for d in looks.settle() if isinstance(d, Decline)]


def test_a_worker_is_moved_by_hand_and_stays_there() -> None:
    looks = begun([4], job())
    assert ask(looks, worker="w1", role="training") == []
    assert looks.roles()["w1"] == "training"
    resident = dict(looks.residents())["w1"]
    assert resident.pinned
    run(looks, Plant(base_s=0.3, work_s=0.2), 20)
    assert looks.roles()["w1"] == "training", "the policy leaves it alone"


def test_a_worker_is_put_aside_and_taken_back() -> None:
    looks = begun([3], job())
    ask(looks, worker="w2", role="idle")
    assert looks.roles() == {"w0": "core", "w1": "rollout"}
    ask(looks, worker="w2", role="rollout")
    assert looks.roles() == {"w0": "core", "w1": "rollout", "w2": "rollout"}


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"worker": "w9", "role": "rollout"}, "no worker is called w9"),
        ({"worker": "w1", "role": "dance"}, "dance is no role"),
        ({"worker": "w0", "role": "rollout"}, "w0 is in the core of job"),
        ({"worker": "w2", "role": "training", "job": "x"}, "no job is called x"),
        ({"worker": "w1", "role": "rollout"}, "hosts the frozen models"),
        ({"kind": "drain", "host": "nowhere"}, "no host is called nowhere"),
    ],
)
def test_a_request_that_cannot_be_granted_is_declined(about: dict[str, str], reason: str) -> None:
    looks = begun([4], job(scoring=True))
    roles = looks.roles()
    refusals = ask(looks, **about)
    assert len(refusals) == 1 and reason in refusals[0]
    assert looks.roles() == roles


def test_a_worker_is_moved_from_one_job_to_another() -> None:
    looks = begun([6], job("a"), job("b", submitted_ms=1))
    worker = next(w for w, role in looks.roles("b").items() if role == "rollout")
    ask(looks, worker=worker, role="rollout", job="a")
    assert looks.roles("a")[worker] == "rollout"
    assert (looks.workers_of("a"), looks.workers_of("b")) == (3, 3), "each keeps its share"


def test_a_drain_is_settled_when_nobody_is_left() -> None:
    looks = begun([2, 2], job(checkpointed=True))
    looks.drain("host0")
    looks.change(rests=frozenset(n for host in looks.snapshot.hosts for n in host.services))
    assert ask(looks, kind="drain", host="host0") == [""]
    assert set(looks.roles()) == {"w2", "w3"}
