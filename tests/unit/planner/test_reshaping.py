"""Reshaping: engines get tensor parallel sizes by trajectory lengths, and keep them if they pay."""

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
from tests.unit.planner.plant import SHORT, SLOTS, LongTailPlant, degrees_of, helpers_of, run_tall
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool

ONES = [1] * 7
LONG = LongTailPlant()
JOB = job(model_key="m")


def mesh(workers: int = 8, allowed: tuple[int, ...] = (1, 2, 4), **config: object) -> PlannerBench:
    about: dict[str, Any] = {"steps_done": 0, "slots": SLOTS, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    bench = start_pool(
        [workers], job(tensor_parallel=allowed, model_key="m", max_staleness=0, **about)
    )
    return bench


def run_and_judge(bench: PlannerBench, plant: LongTailPlant, steps: int) -> list[dict[str, Any]]:
    """Return the verdicts of `steps` steps."""
    found = []
    for _ in range(steps):
        run_tall(bench, plant, 1)
        found += [one.details for one in bench.decisions if isinstance(one, ReportMoveOutcome)]
    return found


def predict_plan_s(bench: PlannerBench, plant: LongTailPlant) -> float:
    return sum(plant.stages(degrees_of(bench), helpers_of(bench)))


@pytest.mark.deep
def test_long_tail_leads_to_mixed_engine_sizes() -> None:
    bench, plant = mesh(), replace(LONG)
    assert degrees_of(bench) == ONES
    [verdict] = run_and_judge(bench, plant, 60)
    assert len(set(degrees_of(bench))) > 1, "some of several workers, some of one"
    assert verdict["paid"] and verdict["policy"] == "lengths"
    # The prediction does not use which trajectories are long; the plant assigns each to its engine.
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.12)
    assert verdict["from"] == "rollout of 1,1,1,1,1,1,1"
    assert predict_plan_s(bench, plant) < 0.5 * plant.rollout_s(ONES)


@pytest.mark.deep
def test_gangs_slower_than_predicted_are_split_again() -> None:
    bench, plant = mesh(), replace(LONG, drag=4.0)
    [verdict] = run_and_judge(bench, plant, 80)
    assert verdict["undone"] and verdict["predicted_s"] < verdict["observed_s"]
    assert degrees_of(bench) == ONES and helpers_of(bench) == 0
    assert bench.memory.split_states["job"].failed_moves == {"degrees": 1}


@pytest.mark.deep
def test_short_trajectories_use_engines_of_one_worker() -> None:
    bench, plant = mesh(), LongTailPlant(SHORT, sequence_s=0.01, waits=0.5)
    assert run_and_judge(bench, plant, 60) == [] and degrees_of(bench) == ONES
    assert "degrees" in bench.memory.split_states["job"].explanation["verdict"] or (
        "rollout of" in bench.memory.split_states["job"].explanation["verdict"]
    )


@pytest.mark.deep
def test_slow_training_gets_hybrids_together_with_engine_sizes() -> None:
    bench, plant = mesh(), replace(LONG, work_s=60.0)
    verdicts = run_and_judge(bench, plant, 60)
    assert verdicts and all(one["paid"] for one in verdicts)
    assert helpers_of(bench) >= 2 and max(degrees_of(bench)) > 1
    assert predict_plan_s(bench, plant) < 0.4 * sum(plant.stages(ONES, 0))


def test_engines_are_not_reshaped_without_lengths_or_with_a_fixed_split() -> None:
    bench, plant = mesh(moves=False), replace(LONG)
    run_tall(bench, plant, 20)
    assert degrees_of(bench) == ONES
    assert degrees_of(mesh(allowed=(1, 2))) == ONES


@pytest.mark.rotating(2)
def test_single_allowed_size_is_not_reshaped() -> None:
    bench = mesh(9, allowed=(2,))
    run_tall(bench, replace(LONG), 40)
    assert set(degrees_of(bench)) == {2}


@pytest.mark.rotating(2)
def test_requested_sizes_are_reached_over_several_snapshots() -> None:
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
def test_lost_worker_during_reshaping_leaves_engines_of_the_others(lost: str) -> None:
    bench, plant = mesh(), replace(LONG)
    run_tall(bench, plant, 3)
    bench.update_worker(lost, alive=False, token=0)
    run_tall(bench, plant, 12)
    assert sum(degrees_of(bench)) + helpers_of(bench) >= 4 and degrees_of(bench)
    bench.update_worker(lost, alive=True, token=99)
    run_tall(bench, plant, 20)
    assert predict_plan_s(bench, plant) < 0.6 * plant.rollout_s(ONES)
    assert bench.memory.split_states["job"].desired_shape is None


def test_prediction_of_a_size_is_recorded_with_its_measurement() -> None:
    bench, plant = mesh(), replace(LONG, drag=1.3)
    run_tall(bench, plant, 12)
    lines = [one for one in format_predictions(bench.memory) if "rollout:4 on cpu" in one]
    assert len(lines) == 1 and "observed" in lines[0]
    factor = bench.memory.correction.get_factor(engine_curves.build_correction_key("m", ("cpu", 4)))
    assert factor.value == pytest.approx(1.3, rel=0.01)


def test_curves_of_unused_sizes_derive_from_one_worker() -> None:
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
    emulated = engine_curves.get_curve(
        ("cpu", 4), known, replace(JOB, emulated_engine="a100-7b"), none
    )
    assert emulated is not None and emulated.base_s != four.base_s
    assert engine_curves.get_curve(("gpu", 4), known, JOB, none) is None
    measured = engine_curves.update_curves(known, [LONG.curve(4)])
    assert engine_curves.get_curve(("cpu", 4), measured, JOB, off) == LONG.curve(4)


def test_each_core_rank_counts_as_a_training_worker() -> None:
    bench = start_pool([8], job(tensor_parallel=(1, 2), ranks=3, model_key="m"))
    (one,) = bench.snapshot.jobs
    draft = PoolDraft(bench.snapshot, bench.snapshot.workers)
    count_split = read_split(draft, one)
    assert (count_split.engines, count_split.trainers) == (
        len(degrees_of(bench)),
        3 + helpers_of(bench),
    )


WIDE = PoolSettings(gang_scope="network")


def list_core_hosts(bench: PlannerBench) -> list[str]:
    """Return the hosts of the core's ranks, in their order."""
    host = {worker.id: worker.host for worker in bench.snapshot.workers}
    gangs = [g for g in bench.snapshot.gangs if any(r.core for r in g.instances)]
    return [host[worker] for gang in gangs for worker in gang.workers]


def test_core_spans_hosts_only_if_allowed() -> None:
    wanted = job(ranks=4)
    for settings_, hosts in ((PoolSettings(), []), (WIDE, ["host0", "host1", "host1", "host1"])):
        bench = PlannerBench(pool([2, 3], wanted, settings=settings_))
        bench.settle()
        assert sorted(list_core_hosts(bench)) == hosts
        assert bool(explain_infeasible(wanted.requirements, bench.snapshot.workers, settings_)) == (
            not hosts
        )


def test_core_that_fits_one_host_is_on_one() -> None:
    bench = start_pool([2, 3, 2], job(ranks=3), settings=WIDE)
    assert list_core_hosts(bench) == ["host1"] * 3


def test_gang_does_not_span_networks() -> None:
    wanted = job(ranks=4)
    bench = PlannerBench(pool([2, 2], wanted, networks=["", "ib"], settings=WIDE))
    run_and_judge = explain_infeasible(wanted.requirements, bench.snapshot.workers, WIDE)
    assert "no network of this mesh has more than 2 workers" in run_and_judge
    bench = start_pool([2, 2, 3], wanted, networks=["", "ib", "ib"], settings=WIDE)
    assert (
        sorted(set(list_core_hosts(bench))) == ["host1", "host2"]
        and len(list_core_hosts(bench)) == 4
    )


def test_core_moves_when_a_host_drains_or_is_lost() -> None:
    """Check that a core resumes at its checkpoint when its other host drains or is lost. The host
    that it leaves has nothing of it any more.
    """
    for lost in (False, True):
        wanted = job(ranks=4, has_checkpoint=True)
        bench = PlannerBench(pool([3, 1, 3], wanted, settings=WIDE))
        bench.settle()
        assert sorted(set(list_core_hosts(bench))) == ["host0", "host1"]
        if lost:
            for worker in bench.snapshot.workers:
                if worker.host == "host1":
                    bench.update_worker(worker.id, alive=False)
            bench.settle()
            bench.update(now_ms=bench.snapshot.now_ms + round(1000 * WIDE.worker_lost_s) + 1)
        else:
            bench.update(requests=(PoolRequest("op", "drain", host="host1"),))
        bench.settle()
        assert sorted(list_core_hosts(bench)) == ["host0"] * 3 + ["host2"]


def test_gang_over_hosts_ends_after_a_checkpoint_once_disallowed() -> None:
    bench = start_pool([2, 2, 4], job(ranks=4), settings=WIDE)
    assert list_core_hosts(bench) == ["host2"] * 4
    bench = PlannerBench(pool([2, 3], job(ranks=3, has_checkpoint=True), settings=WIDE))
    bench.update_worker("w2", alive=False)
    bench.settle()
    assert set(list_core_hosts(bench)) == {"host0", "host1"}
    bench.update_worker("w2", alive=True)
    bench.update(settings=replace(WIDE, gang_scope="host"))
    bench.settle()
    assert list_core_hosts(bench) == ["host1"] * 3


def start_pool_of_kinds(hosts: Sequence[int], kinds: Sequence[str], **wanted: Any) -> PlannerBench:
    """Return a settled pool whose hosts have accelerators of these kinds."""
    snapshot = pool(hosts, job(**wanted), settings=WIDE)
    named = {f"host{number}": f"cuda:0 {kind}" for number, kind in enumerate(kinds)}
    workers = tuple(replace(w, accelerator=named[w.host]) for w in snapshot.workers)
    bench = PlannerBench(replace(snapshot, workers=workers))
    bench.settle()
    return bench


def test_attention_gets_the_fastest_accelerators_and_experts_the_slowest() -> None:
    kinds = ["Tesla V100-SXM2-32GB", "NVIDIA A40", "NVIDIA H100 80GB HBM3"]
    bench = start_pool_of_kinds([4, 4, 1], kinds, ranks=5, attention_ranks=2)
    assert list_core_hosts(bench) == ["host1"] * 2 + ["host0"] * 3
    bench = start_pool_of_kinds([4, 4, 1], kinds, ranks=3, attention_ranks=1)
    assert list_core_hosts(bench) == ["host2"] + ["host0"] * 2


def test_attention_gets_the_fastest_accelerators_of_three_kinds() -> None:
    bench = start_pool_of_kinds(
        [2, 2], ["Tesla V100-SXM2-32GB", "NVIDIA A40"], ranks=4, attention_ranks=3
    )
    assert list_core_hosts(bench) == ["host1"] * 2 + ["host0"] * 2
    bench = start_pool_of_kinds([3, 2], ["NVIDIA A40", "NVIDIA A40"], ranks=3, attention_ranks=1)
    assert list_core_hosts(bench) == ["host0"] * 3


offers = st.lists(st.lists(st.integers(0, 7).map(lambda n: 15 * n), max_size=4), max_size=5)


@given(offers, st.integers(1, 8), st.sampled_from([UNSAVED_CORE_COST, UNAVAILABLE_COST]))
@settings(max_examples=300, deadline=None)
def test_core_uses_the_fewest_hosts(costs: list[list[int]], ranks: int, most: int) -> None:
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
