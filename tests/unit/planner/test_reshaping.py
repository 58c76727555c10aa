"""Engines get the degrees that the lengths of trajectories ask for, and keep them where it pays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.pool.scheduling.decisions import ReportMoveOutcome
from meshrl.common.state.pool.scheduling.feasibility import explain_infeasible
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.balance.replan_assessment import read_split
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.explain import format_predictions
from meshrl.services.planner.forecast import engine_curves
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies.core_placement import (
    UNAVAILABLE_COST,
    UNSAVED_CORE_COST,
    choose_fewest_hosts,
)
from meshrl.services.planner.pool.draft import PoolDraft
from tests.unit.planner.plant import SHORT, SLOTS, Tall, degrees_of, helpers_of, run_tall
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool

ONES = [1] * 7
LONG = Tall()
JOB = job(model_key="m")


def mesh(workers: int = 8, allowed: tuple[int, ...] = (1, 2, 4), **config: object) -> PlannerBench:
    about: dict[str, Any] = {"steps_done": 0, "slots": SLOTS, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    bench = start_pool(
        [workers], job(tensor_parallel=allowed, model_key="m", max_staleness=0, **about)
    )
    return bench


def told(bench: PlannerBench, plant: Tall, steps: int) -> list[dict[str, Any]]:
    """Return the verdicts of so many steps."""
    found = []
    for _ in range(steps):
        run_tall(bench, plant, 1)
        found += [one.details for one in bench.decisions if isinstance(one, ReportMoveOutcome)]
    return found


def takes_s(bench: PlannerBench, plant: Tall) -> float:
    return sum(plant.stages(degrees_of(bench), helpers_of(bench)))


@pytest.mark.deep
def test_a_long_tail_leads_to_a_mixture_that_pays_and_stays() -> None:
    bench, plant = mesh(), replace(LONG)
    assert degrees_of(bench) == ONES
    [verdict] = told(bench, plant, 60)
    assert len(set(degrees_of(bench))) > 1, "some of several workers, some of one"
    assert verdict["paid"] and verdict["policy"] == "lengths"
    # The prediction does not use which are long; the plant has each where it belongs.
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.12)
    assert verdict["from"] == "rollout of 1,1,1,1,1,1,1"
    assert takes_s(bench, plant) < 0.5 * plant.rollout_s(ONES)


@pytest.mark.deep
def test_gangs_that_are_slower_than_predicted_are_split_again_and_stay_so() -> None:
    bench, plant = mesh(), replace(LONG, drag=4.0)
    [verdict] = told(bench, plant, 80)
    assert verdict["undone"] and verdict["predicted_s"] < verdict["observed_s"]
    assert degrees_of(bench) == ONES and helpers_of(bench) == 0
    assert bench.memory.split_states["job"].failed_moves == {"degrees": 1}


@pytest.mark.deep
def test_short_trajectories_are_left_to_engines_of_one_worker() -> None:
    bench, plant = mesh(), Tall(SHORT, sequence_s=0.01, waits=0.5)
    assert told(bench, plant, 60) == [] and degrees_of(bench) == ONES
    assert "degrees" in bench.memory.split_states["job"].explanation["verdict"] or (
        "rollout of" in bench.memory.split_states["job"].explanation["verdict"]
    )


@pytest.mark.deep
def test_helpers_come_with_degrees_where_training_takes_longer() -> None:
    bench, plant = mesh(), replace(LONG, work_s=60.0)
    verdicts = told(bench, plant, 60)
    assert verdicts and all(one["paid"] for one in verdicts)
    assert helpers_of(bench) >= 2 and max(degrees_of(bench)) > 1
    assert takes_s(bench, plant) < 0.4 * sum(plant.stages(ONES, 0))


def test_nothing_is_reshaped_without_lengths_or_where_the_split_is_held() -> None:
    bench, plant = mesh(moves=False), replace(LONG)
    run_tall(bench, plant, 20)
    assert degrees_of(bench) == ONES
    assert degrees_of(mesh(allowed=(1, 2))) == ONES


@pytest.mark.rotating(2)
def test_one_degree_alone_leaves_engines_as_they_are() -> None:
    bench = mesh(9, allowed=(2,))
    run_tall(bench, replace(LONG), 40)
    assert set(degrees_of(bench)) == {2}


@pytest.mark.rotating(2)
def test_a_wish_is_remembered_and_pursued_over_looks_until_all_is_there() -> None:
    bench, plant = mesh(), replace(LONG)
    for _ in range(40):
        run_tall(bench, plant, 1, ready=False)
        document = json.loads(json.dumps(bench.memory.encode()))
        assert PlannerMemory.decode(document).encode() == document
        bench.decide_once()
    assert bench.memory.split_states["job"].desired_shape is None and bench.snapshot.moves == ()
    assert max(degrees_of(bench)) > 1


@pytest.mark.rotating(3)
@pytest.mark.parametrize("lost", ["w1", "w3", "w7"])
def test_a_worker_that_is_lost_meanwhile_ends_in_engines_of_the_others(lost: str) -> None:
    bench, plant = mesh(), replace(LONG)
    run_tall(bench, plant, 3)
    bench.update_worker(lost, alive=False, token=0)
    run_tall(bench, plant, 25)
    assert sum(degrees_of(bench)) + helpers_of(bench) >= 4 and degrees_of(bench)
    bench.update_worker(lost, alive=True, token=99)
    run_tall(bench, plant, 40)
    assert takes_s(bench, plant) < 0.6 * plant.rollout_s(ONES)
    assert bench.memory.split_states["job"].desired_shape is None


def test_what_was_predicted_of_a_degree_is_shown_beside_what_was_measured() -> None:
    bench, plant = mesh(), replace(LONG, drag=1.3)
    run_tall(bench, plant, 12)
    lines = [one for one in format_predictions(bench.memory) if "rollout:4 on cpu" in one]
    assert len(lines) == 1 and "observed" in lines[0]
    factor = bench.memory.correction.get_factor(engine_curves.build_correction_key("m", ("cpu", 4)))
    assert factor.value == pytest.approx(1.3, rel=0.01)


def test_curves_of_degrees_that_nobody_has_are_those_of_one_worker_corrected() -> None:
    one = LONG.curve(1)
    known = engine_curves.update_curves({}, [one])
    none = Correction()
    four = engine_curves.get_curve(("cpu", 4), known, JOB, none)
    assert four is not None and four.base_s == pytest.approx(LONG.curve(4).base_s)
    off = none.observe(engine_curves.build_correction_key("m", ("cpu", 4)), 1.0, 2.0)
    slower = engine_curves.get_curve(("cpu", 4), known, JOB, off)
    assert slower is not None and slower.predict_step_s(8) == pytest.approx(
        2 * four.predict_step_s(8)
    )
    paced = engine_curves.get_curve(
        ("cpu", 4), known, replace(JOB, emulated_engine="a100-7b"), none
    )
    assert paced is not None and paced.base_s != four.base_s
    assert engine_curves.get_curve(("gpu", 4), known, JOB, none) is None
    measured = engine_curves.update_curves(known, [LONG.curve(4)])
    assert engine_curves.get_curve(("cpu", 4), measured, JOB, off) == LONG.curve(4)


def test_each_rank_of_a_core_counts_as_one_that_trains() -> None:
    bench = start_pool([8], job(tensor_parallel=(1, 2), ranks=3, model_key="m"))
    (one,) = bench.snapshot.jobs
    draft = PoolDraft(bench.snapshot, bench.snapshot.workers)
    split = read_split(one, draft.get_instances(one.id))
    assert (split.engines, split.trainers) == (len(degrees_of(bench)), 3 + helpers_of(bench))


WIDE = PoolSettings(gang_scope="network")


def core_on(bench: PlannerBench) -> list[str]:
    """Return the hosts of the core's ranks, in their order."""
    host = {worker.id: worker.host for worker in bench.snapshot.workers}
    gangs = [g for g in bench.snapshot.gangs if any(r.core for r in g.instances)]
    return [host[worker] for gang in gangs for worker in gang.workers]


def test_a_core_spans_hosts_only_where_the_pool_says_so() -> None:
    wanted = job(ranks=4)
    for settings_, hosts in ((PoolSettings(), []), (WIDE, ["host0", "host1", "host1", "host1"])):
        bench = PlannerBench(pool([2, 3], wanted, settings=settings_))
        bench.settle()
        assert sorted(core_on(bench)) == hosts
        assert bool(explain_infeasible(wanted.requirements, bench.snapshot.workers, settings_)) == (
            not hosts
        )


def test_a_core_that_fits_on_a_host_is_on_one() -> None:
    bench = start_pool([2, 3, 2], job(ranks=3), settings=WIDE)
    assert core_on(bench) == ["host1"] * 3


def test_hosts_of_different_networks_do_not_form_a_gang() -> None:
    wanted = job(ranks=4)
    bench = PlannerBench(pool([2, 2], wanted, networks=["", "ib"], settings=WIDE))
    told = explain_infeasible(wanted.requirements, bench.snapshot.workers, WIDE)
    assert "no network of this mesh has more than 2 workers" in told
    bench = start_pool([2, 2, 3], wanted, networks=["", "ib", "ib"], settings=WIDE)
    assert sorted(set(core_on(bench))) == ["host1", "host2"] and len(core_on(bench)) == 4


def test_a_core_whose_other_host_drains_or_is_lost_goes_on_elsewhere() -> None:
    """Check that a core resumes at its checkpoint when its other host drains or is lost. The host
    that it leaves has nothing of it any more.
    """
    for lost in (False, True):
        wanted = job(ranks=4, has_checkpoint=True)
        bench = PlannerBench(pool([3, 1, 3], wanted, settings=WIDE))
        bench.settle()
        assert sorted(set(core_on(bench))) == ["host0", "host1"]
        if lost:
            for worker in bench.snapshot.workers:
                if worker.host == "host1":
                    bench.update_worker(worker.id, alive=False)
            bench.settle()
            bench.update(now_ms=bench.snapshot.now_ms + round(1000 * WIDE.worker_lost_s) + 1)
        else:
            bench.update(requests=(PoolRequest("op", "drain", host="host1"),))
        bench.settle()
        assert sorted(core_on(bench)) == ["host0"] * 3 + ["host2"]


def test_a_gang_that_may_span_hosts_no_more_ends_when_a_checkpoint_has_it() -> None:
    bench = start_pool([2, 2, 4], job(ranks=4), settings=WIDE)
    assert core_on(bench) == ["host2"] * 4
    bench = PlannerBench(pool([2, 3], job(ranks=3, has_checkpoint=True), settings=WIDE))
    bench.update_worker("w2", alive=False)
    bench.settle()
    assert set(core_on(bench)) == {"host0", "host1"}
    bench.update_worker("w2", alive=True)
    bench.update(settings=replace(WIDE, gang_scope="host"))
    bench.settle()
    assert core_on(bench) == ["host1"] * 3


def of_kinds(hosts: Sequence[int], kinds: Sequence[str], **wanted: Any) -> PlannerBench:
    """Return a settled pool whose hosts have accelerators of these kinds."""
    snapshot = pool(hosts, job(**wanted), settings=WIDE)
    named = {f"host{number}": f"cuda:0 {kind}" for number, kind in enumerate(kinds)}
    workers = tuple(replace(w, accelerator=named[w.host]) for w in snapshot.workers)
    bench = PlannerBench(replace(snapshot, workers=workers))
    bench.settle()
    return bench


def test_attention_has_the_fastest_accelerators_and_experts_the_slowest() -> None:
    kinds = ["Tesla V100-SXM2-32GB", "NVIDIA A40", "NVIDIA H100 80GB HBM3"]
    bench = of_kinds([4, 4, 1], kinds, ranks=5, attention_ranks=2)
    assert core_on(bench) == ["host1"] * 2 + ["host0"] * 3
    bench = of_kinds([4, 4, 1], kinds, ranks=3, attention_ranks=1)
    assert core_on(bench) == ["host2"] + ["host0"] * 2


def test_where_two_kinds_are_not_enough_the_fastest_of_all_have_attention() -> None:
    bench = of_kinds([2, 2], ["Tesla V100-SXM2-32GB", "NVIDIA A40"], ranks=4, attention_ranks=3)
    assert core_on(bench) == ["host1"] * 2 + ["host0"] * 2
    bench = of_kinds([3, 2], ["NVIDIA A40", "NVIDIA A40"], ranks=3, attention_ranks=1)
    assert core_on(bench) == ["host0"] * 3


offers = st.lists(st.lists(st.integers(0, 7).map(lambda n: 15 * n), max_size=4), max_size=5)


@given(offers, st.integers(1, 8), st.sampled_from([UNSAVED_CORE_COST, UNAVAILABLE_COST]))
@settings(max_examples=300, deadline=None)
def test_a_core_has_the_fewest_hosts(costs: list[list[int]], ranks: int, most: int) -> None:
    numbers = iter(range(100))
    there = {
        f"host{n}": [(cost, (2, f"w{next(numbers):02}")) for cost in some]
        for n, some in enumerate(costs)
    }
    of = {worker: (host, cost) for host, some in there.items() for cost, (_, worker) in some}
    chosen = choose_fewest_hosts(there, ranks, most)
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
