"""Gangs on workers of several hosts: only of one network, and on as few hosts as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.pool.placing.fitting import never_fits
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.policies.cores import DEAR, NEVER, fewest_hosts
from tests.unit.planner.pools import Looks, begun, job, pool

WIDE = PoolSettings(gangs="network")


def core_on(looks: Looks) -> list[str]:
    """Hosts of the ranks of the core, in their order."""
    host = {worker.id: worker.host for worker in looks.snapshot.workers}
    gangs = [g for g in looks.snapshot.gangs if any(r.core for r in g.residents)]
    return [host[worker] for gang in gangs for worker in gang.workers]


def test_a_core_spans_hosts_only_where_the_pool_says_so() -> None:
    wanted = job(ranks=4)
    for settings_, hosts in ((PoolSettings(), []), (WIDE, ["host0", "host1", "host1", "host1"])):
        looks = Looks(pool([2, 3], wanted, settings=settings_))
        looks.settle()
        assert sorted(core_on(looks)) == hosts
        assert bool(never_fits(wanted.need, looks.snapshot.workers, settings_)) == (not hosts)


def test_a_core_that_fits_on_a_host_is_on_one() -> None:
    looks = begun([2, 3, 2], job(ranks=3), settings=WIDE)
    assert core_on(looks) == ["host1"] * 3


def test_hosts_of_different_networks_do_not_form_a_gang() -> None:
    wanted = job(ranks=4)
    looks = Looks(pool([2, 2], wanted, networks=["", "ib"], settings=WIDE))
    told = never_fits(wanted.need, looks.snapshot.workers, WIDE)
    assert "no network of this mesh has more than 2 workers" in told
    looks = begun([2, 2, 3], wanted, networks=["", "ib", "ib"], settings=WIDE)
    assert sorted(set(core_on(looks))) == ["host1", "host2"] and len(core_on(looks)) == 4


def test_a_core_whose_other_host_drains_or_is_lost_goes_on_elsewhere() -> None:
    """Where it has a checkpoint; the host that it leaves has nothing of it any more."""
    for lost in (False, True):
        wanted = job(ranks=4, checkpointed=True)
        looks = Looks(pool([3, 1, 3], wanted, settings=WIDE))
        looks.settle()
        assert sorted(set(core_on(looks))) == ["host0", "host1"]
        if lost:
            for worker in looks.snapshot.workers:
                if worker.host == "host1":
                    looks.worker(worker.id, alive=False)
            looks.settle()
            looks.change(now_ms=looks.snapshot.now_ms + round(1000 * WIDE.lost_s) + 1)
        else:
            looks.change(requests=(PoolRequest("op", "drain", host="host1"),))
        looks.settle()
        assert sorted(core_on(looks)) == ["host0"] * 3 + ["host2"]


def test_a_gang_that_may_span_hosts_no_more_ends_when_a_checkpoint_has_it() -> None:
    looks = begun([2, 2, 4], job(ranks=4), settings=WIDE)
    assert core_on(looks) == ["host2"] * 4
    looks = Looks(pool([2, 3], job(ranks=3, checkpointed=True), settings=WIDE))
    looks.worker("w2", alive=False)
    looks.settle()
    assert set(core_on(looks)) == {"host0", "host1"}
    looks.worker("w2", alive=True)
    looks.change(settings=replace(WIDE, gangs="host"))
    looks.settle()
    assert core_on(looks) == ["host1"] * 3


def of_kinds(hosts: Sequence[int], kinds: Sequence[str], **wanted: Any) -> Looks:
    """A settled pool whose hosts have accelerators of these kinds."""
    snapshot = pool(hosts, job(**wanted), settings=WIDE)
    named = {f"host{number}": f"cuda:0 {kind}" for number, kind in enumerate(kinds)}
    workers = tuple(replace(w, accelerator=named[w.host]) for w in snapshot.workers)
    looks = Looks(replace(snapshot, workers=workers))
    looks.settle()
    return looks


def test_attention_has_the_fastest_accelerators_and_experts_the_slowest() -> None:
    kinds = ["Tesla V100-SXM2-32GB", "NVIDIA A40", "NVIDIA H100 80GB HBM3"]
    looks = of_kinds([4, 4, 1], kinds, ranks=5, attention=2)
    assert core_on(looks) == ["host1"] * 2 + ["host0"] * 3
    looks = of_kinds([4, 4, 1], kinds, ranks=3, attention=1)
    assert core_on(looks) == ["host2"] + ["host0"] * 2


def test_where_two_kinds_are_not_enough_the_fastest_of_all_have_attention() -> None:
    looks = of_kinds([2, 2], ["Tesla V100-SXM2-32GB", "NVIDIA A40"], ranks=4, attention=3)
    assert core_on(looks) == ["host1"] * 2 + ["host0"] * 2
    looks = of_kinds([3, 2], ["NVIDIA A40", "NVIDIA A40"], ranks=3, attention=1)
    assert core_on(looks) == ["host0"] * 3


offers = st.lists(st.lists(st.integers(0, 7).map(lambda n: 15 * n), max_size=4), max_size=5)


@given(offers, st.integers(1, 8), st.sampled_from([DEAR, NEVER]))
@settings(max_examples=300, deadline=None)
def test_a_core_has_the_fewest_hosts_that_have_its_ranks(
    costs: list[list[int]], ranks: int, most: int
) -> None:
    numbers = iter(range(100))
    there = {
        f"host{n}": [(cost, (2, f"w{next(numbers):02}")) for cost in some]
        for n, some in enumerate(costs)
    }
    of = {worker: (host, cost) for host, some in there.items() for cost, (_, worker) in some}
    chosen = fewest_hosts(there, ranks, most)
    rooms = [sum(cost < most for cost in some) for some in costs]
    needed = next(
        (k for k in range(1, 6) if any(sum(c) >= ranks for c in combinations(rooms, k))), None
    )
    assert bool(chosen) == (needed is not None)
    if needed is None:
        return
    assert len(set(chosen)) == len(chosen) == ranks
    assert all(of[worker][1] < most for worker in chosen)
    hosts = [of[worker][0] for worker in chosen]
    assert len(set(hosts)) == needed
    assert sum(one != other for one, other in pairwise(hosts)) == needed - 1
    for host in set(hosts):  # the cheapest workers of each host
        taken = sorted(of[worker][1] for worker in chosen if of[worker][0] == host)
        assert taken == sorted(cost for cost, _ in there[host])[: len(taken)]
    if needed == 1:
        cheapest = min(
            sum(sorted(some)[:ranks])
            for some, room in zip(costs, rooms, strict=True)
            if room >= ranks
        )
        assert sum(of[worker][1] for worker in chosen) == cheapest
