"""Simulated clusters and their jobs: the planner's decisions, the gate and the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.simulator.__main__ import spec_of
from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.placing.decisions import Form
from meshrl.services.planner.decide import decide
from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.cluster import Cluster, SimFailure, SimHosts
from meshrl.sim.cluster.model.job import JobSpec
from meshrl.sim.cluster.model.training import SimTraining
from meshrl.sim.drift import Drift
from meshrl.sim.mesh.job.workload import PacedWorkload

TRAINED = PacedWorkload(
    workers=4, steps=16, median=Drift(20.0, 20.0), decode="100/8/4000", training="60/50"
)


def ran(job: JobSpec, workers: int = 4, until_s: float = 3600.0) -> Cluster:
    cluster = Cluster([SimHosts(1, workers)], [job])
    cluster.run(until_s)
    return cluster


def test_the_same_cluster_has_the_same_run() -> None:
    one, other = (ran(spec_of(TRAINED, 1)) for _ in range(2))
    assert one.jobs["job"].training.ended_s == other.jobs["job"].training.ended_s
    assert [m.details for m in one.moves] == [m.details for m in other.moves]


def test_the_planner_moves_engines_where_training_takes_longer_and_that_pays() -> None:
    moved, held = ran(spec_of(TRAINED, 1)), ran(spec_of(TRAINED.held(0), 1))
    assert moved.moves and not held.moves
    assert {m.details["to"] for m in moved.moves} == {"training"}
    times = [one.jobs["job"].training.ended_s[-1] for one in (moved, held)]
    assert times[0] < 0.8 * times[1]


def test_what_trains_was_sampled_once() -> None:
    job = ran(spec_of(TRAINED, 2)).jobs["job"]
    assert job.training.over and len(job.training.ended_s) == 16
    counted = job.shards[0].worked
    groups = 16 * 4 + job.training.requeued // 6
    assert counted.groups == groups, "no group beyond the last step is opened"
    assert counted.trajectories == 6 * groups and not job.shards[0].under_way
    assert job.shards[0].work.queue_s >= 0


def test_trajectories_go_on_where_their_engine_has_gone() -> None:
    """An engine that leaves in the middle of a run; what it made counts."""
    spec = spec_of(TRAINED.held(0), 3)
    cluster = Cluster([SimHosts(1, 4)], [spec])
    job = cluster.jobs["job"]
    cluster.agenda.at(20.0, lambda: job.gone(sorted(job.shards[0].places)[0]))
    cluster.run(3600.0)
    whole = ran(spec).jobs["job"]
    assert job.training.over and len(job.shards[0].places) == 2
    assert job.shards[0].worked.groups == whole.shards[0].worked.groups


def test_two_jobs_share_a_cluster() -> None:
    one = replace(spec_of(TRAINED, 1), name="one", need=Need(most=3))
    other = replace(spec_of(TRAINED.held(0), 2), name="other")
    cluster = Cluster([SimHosts(2, 4)], [one, other])
    cluster.run(3600.0)
    assert all(job.training.over for job in cluster.jobs.values())


@pytest.mark.deep
def test_engines_of_several_degrees_have_buckets_by_length() -> None:
    """Where the tail is what a step waits for, some engines get more accelerators each."""
    tailed = PacedWorkload(workers=8, steps=40, sigma=Drift(1.3, 1.3), training="4000/20")
    spec = replace(spec_of(tailed, 1), need=Need(degrees=(1, 2, 4)), buckets=True)
    assert "lengths" in {one.details["policy"] for one in ran(spec, workers=8).judged}
    there = replace(spec, engines=(4, 2, 1), planner=replace(spec.planner, moves=False))
    job = ran(there, workers=8).jobs["job"]
    assert job.training.over
    buckets = {place.engine.degree: place.bucket for place in job.shards[0].places.values()}
    assert buckets == {1: 0, 2: 1, 4: 2}, "short lengths for small degrees"


def test_decisions_are_those_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is applied as it was decided: gangs are formed in the order of their numbers."""
    formed: list[str] = []

    def watched(snapshot, memory):  # type: ignore[no-untyped-def]
        decisions, then = decide(snapshot, memory)
        formed.extend(one.gang for one in decisions if isinstance(one, Form))
        return decisions, then

    monkeypatch.setattr("meshrl.sim.cluster.model.cluster.decide", watched)
    ran(spec_of(TRAINED, 1))
    assert formed[:4] == ["g0", "g1", "g2", "g3"] and len(formed) == len(set(formed))


def test_a_job_that_gives_its_workers_away_does_nothing_meanwhile() -> None:
    """One of a higher priority takes all; who sleeps for it makes no steps, and goes on behind."""
    first = replace(spec_of(TRAINED.held(0), 1), name="first")
    taking = replace(spec_of(TRAINED.held(0), 2), name="taking", need=Need(priority=1, least=4))
    cluster = Cluster([SimHosts(1, 4)], [first, taking])
    cluster.run(3600.0)
    one, other = (cluster.jobs[name].training for name in ("first", "taking"))
    assert one.over and other.over
    assert one.ended_s[0] > other.ended_s[-1]


def test_a_host_that_fails_takes_its_engines_along_and_comes_back() -> None:
    spec = spec_of(replace(TRAINED.held(0), training="4000/20", median=Drift(200.0, 200.0)), 1)
    whole = Cluster([SimHosts(2, 4)], [spec])
    whole.run(3600.0)
    torn = Cluster([SimHosts(2, 4)], [spec], failures=[SimFailure(1, 20.0, 60.0)])
    counts: list[int] = []
    for at_s in (19.0, 30.0, 120.0):
        torn.agenda.at(at_s, lambda: counts.append(len(torn.jobs["job"].engines)))
    torn.run(3600.0)
    assert counts == [7, 3, 7]
    (one,), (other,) = whole.jobs.values(), torn.jobs.values()
    assert other.training.over and other.training.ended_s != one.training.ended_s
    # What was under way there went on elsewhere, from what it had.
    assert other.sampled == pytest.approx(one.sampled, rel=0.1)


def test_a_core_whose_host_never_comes_back_goes_on_elsewhere() -> None:
    spec = spec_of(TRAINED.held(0), 1)
    cluster = Cluster([SimHosts(2, 4)], [spec], failures=[SimFailure(0, 20.0, 0.0)])
    cluster.run(3600.0)
    (job,) = cluster.jobs.values()
    assert job.training.over and job.training.version == spec.steps


def test_weights_that_arrive_later_are_generated_with_later() -> None:
    soon = spec_of(TRAINED.held(0), 1)
    late = replace(soon, arrives_s=lambda kind, degree: 30.0)
    runs = [ran(spec).jobs["job"] for spec in (soon, late)]
    assert all(job.training.over for job in runs)
    assert runs[1].training.requeued >= runs[0].training.requeued
    assert runs[1].training.ended_s != runs[0].training.ended_s
    assert {engine.version for engine in runs[1].engines} != {late.steps}, "the last ones are due"


@pytest.mark.deep
def test_a_job_of_many_engines_has_several_shards() -> None:
    spec = replace(spec_of(TRAINED.held(0), 1), groups_per_step=48, steps=3)
    job = ran(spec, workers=150).jobs["job"]
    assert job.training.over
    assert sorted(len(shard.places) for shard in job.shards) == [21, 64, 64]
    assert all(shard.worked.trajectories for shard in job.shards)


class Costs:
    """A token a second, and half a second of an update."""

    def replicas(self, workers: int, core: bool) -> int:
        return workers

    def update_s(self) -> float:
        return 0.5

    def bins_s(self, tokens: Sequence[float]) -> Sequence[float]:
        return tokens


def training(agenda: Agenda, steps: int = 4, staleness: int = 1) -> SimTraining:
    return SimTraining(agenda, Costs(), 2, 1, staleness, steps, lambda: None)


def end_group(job: SimTraining, number: int, length: float) -> None:
    job.ended(number, 0, length)


def test_gradients_are_computed_while_further_groups_are_waited_for() -> None:
    agenda = Agenda()
    job = training(agenda)
    job.attend("core", 1)
    first, second = job.admit(2)
    agenda.at(1.0, partial(end_group, job, first.number, 4.0))
    agenda.at(10.0, partial(end_group, job, second.number, 3.0))
    agenda.run(100.0, lambda: False)
    assert job.ended_s == [13.5]  # not 17.5: the first was computed by then
    work = job.work
    assert (work.work_s, work.wait_s, work.busy_s, work.tokens) == (7.0, 10.0, 3.5, 7.0)


def test_pieces_go_to_who_is_free_first() -> None:
    agenda = Agenda()
    job = training(agenda)
    job.attend("core", 1)
    job.attend("helper", 1)
    for group in job.admit(2):
        job.ended(group.number, 0, 4.0)
    agenda.run(100.0, lambda: False)
    assert job.ended_s == [4.5]


def test_the_gate_admits_what_is_trained_in_time() -> None:
    agenda = Agenda()
    job = training(agenda, steps=3)
    assert [g.number for g in job.admit(99)] == [0, 1, 2, 3] and not job.admit(1)
    job.attend("core", 1)
    job.ended(0, 0, 1.0)
    job.ended(1, 0, 1.0)
    agenda.run(100.0, lambda: False)
    assert job.version == 1 and [g.number for g in job.admit(99)] == [4, 5]
    assert not job.admit(1), "groups beyond the last step are not opened"


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000), staleness=st.integers(0, 3), workers=st.integers(1, 3))
def test_all_steps_are_made_of_groups_that_are_young_enough(
    seed: int, staleness: int, workers: int
) -> None:
    random, agenda = Random(seed), Agenda()
    trained: list[int] = []  # versions between a group's first token and its step

    class Watched(SimTraining):
        def _commit(self, step: int) -> None:
            trained.extend(self.version - group.oldest for group in self._leased)
            super()._commit(step)

    def opens() -> None:
        for group in job.admit(8):
            ends_s, oldest = random.expovariate(0.2), job.version
            number = group.number

            def end(number: int = number, oldest: int = oldest) -> None:
                job.ended(number, oldest, random.random())

            agenda.after(ends_s, end)

    def look() -> None:
        opens()
        agenda.after(0.1, look)

    job = Watched(agenda, Costs(), 2, 1, staleness, 12, opens)
    job.attend("core", workers)
    look()
    agenda.run(1e5, lambda: job.over)
    assert job.over and len(trained) == 24
    assert max(trained) <= staleness


def test_a_step_whose_core_has_ended_is_made_of_the_same_groups_by_the_next_one() -> None:
    agenda = Agenda()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 2, 2, lambda: made.append(agenda.now_s))
    job.attend("core", 1)
    for group in job.admit(2):
        job.ended(group.number, 0, 100.0)
    agenda.run(0.01, lambda: False)
    job.lose()
    job.dismiss("core")
    agenda.run(50.0, lambda: False)
    assert made == [] and job.version == 0
    agenda.at(60.0, lambda: job.attend("other", 2))
    agenda.run(400.0, lambda: bool(made))
    assert job.version == 1 and made == [60.0 + 100.0 + 0.5], "what it had begun is nobody's"


def test_accelerators_that_generate_train_when_all_groups_are_there() -> None:
    agenda = Agenda()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 0, 1, lambda: made.append(agenda.now_s), switch_s=5.0)
    job.attend("core", 1)
    first, other = job.admit(8)
    job.ended(first.number, 0, 1.0)
    agenda.at(10.0, partial(end_group, job, other.number, 1.0))
    agenda.run(100.0, lambda: job.over)
    alone = sum(Costs().bins_s([1.0])) * 2 + Costs().update_s()
    assert made == [pytest.approx(15.0 + alone)]
