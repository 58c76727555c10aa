"""Simulated clusters with their engines and jobs: planner decisions, admission gate and steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.simulator.__main__ import spec_of
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.decisions import FormGang
from meshrl.services.planner.decision import decide
from meshrl.sim.cluster.model.cluster import SimCluster, SimFailure, SimHosts
from meshrl.sim.cluster.model.engine import SimEngine, SimRequest
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.job import JobSpec
from meshrl.sim.cluster.model.training import SimTraining
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

TRAINED = EmulatedWorkload(
    workers=4,
    steps=10,
    median_tokens=LinearDrift(20.0, 20.0),
    engine_speed="100/8/4000",
    training_speed="60/50",
)


def run_cluster(job: JobSpec, workers: int = 4, until_s: float = 3600.0) -> SimCluster:
    cluster = SimCluster([SimHosts(1, workers)], [job])
    cluster.run(until_s)
    return cluster


@functools.cache
def run_trained(is_static: bool) -> SimCluster:
    """Return a finished run that several tests read."""
    return run_cluster(spec_of(TRAINED.with_static_split(0) if is_static else TRAINED, 1))


def test_equal_clusters_have_equal_runs() -> None:
    one, other = run_trained(is_static=False), run_cluster(spec_of(TRAINED, 1))
    assert one.jobs["job"].training.step_ends_s == other.jobs["job"].training.step_ends_s
    assert [m.details for m in one.moves] == [m.details for m in other.moves]


def test_planner_moves_engines_to_training_when_that_pays() -> None:
    moved, held = run_trained(is_static=False), run_trained(is_static=True)
    assert moved.moves and not held.moves
    assert {m.details["to"] for m in moved.moves} == {"training"}
    times = [one.jobs["job"].training.step_ends_s[-1] for one in (moved, held)]
    assert times[0] < 0.8 * times[1]


def test_each_trained_trajectory_was_sampled_once() -> None:
    job = run_cluster(spec_of(TRAINED, 2)).jobs["job"]
    assert job.training.is_finished and len(job.training.step_ends_s) == TRAINED.steps
    counted = job.shards[0].work_counter
    groups = TRAINED.steps * 4 + job.training.requeued_trajectories // 6
    assert counted.groups == groups, "no group beyond the last step is opened"
    assert counted.trajectories == 6 * groups and not job.shards[0].trajectories
    assert job.shards[0].work.queue_s >= 0


def test_trajectories_of_a_removed_engine_continue_on_another() -> None:
    spec = spec_of(TRAINED.with_static_split(0), 3)
    cluster = SimCluster([SimHosts(1, 4)], [spec])
    job = cluster.jobs["job"]
    cluster.event_queue.schedule_at(
        20.0, lambda: job.remove_instance(sorted(job.shards[0].engines)[0])
    )
    cluster.run(3600.0)
    whole = run_cluster(spec).jobs["job"]
    assert job.training.is_finished and len(job.shards[0].engines) == 2
    assert job.shards[0].work_counter.groups == whole.shards[0].work_counter.groups


def test_two_jobs_share_a_cluster() -> None:
    one = replace(spec_of(TRAINED, 1), name="one", requirements=JobRequirements(max_workers=3))
    other = replace(spec_of(TRAINED.with_static_split(0), 2), name="other")
    cluster = SimCluster([SimHosts(2, 4)], [one, other])
    cluster.run(3600.0)
    assert all(job.training.is_finished for job in cluster.jobs.values())


def test_engine_that_shares_the_cores_worker_pauses_for_its_slices() -> None:
    """Two workers without staleness: a second engine on the core's worker shortens the rollout."""
    base = replace(
        spec_of(replace(TRAINED, steps=4, training_speed="2000/50").with_static_split(0), 1),
        max_staleness=0,
        slice_switch_s=0.02,
    )
    runs = {}
    for mode in ("never", "always"):
        needs = JobRequirements(colocate=mode, can_time_slice=mode == "always")
        spec = replace(base, requirements=needs)
        cluster = SimCluster([SimHosts(1, 2)], [spec], has_time_slices=True)
        cluster.run(3600.0)
        [job] = cluster.jobs.values()
        assert job.training.is_finished
        assert len(job.training.sliced_engines) == (mode == "always")
        runs[mode] = job.training.step_ends_s[-1], job.training.work.work_s
    assert runs["always"][0] < runs["never"][0]
    assert runs["always"][1] == pytest.approx(runs["never"][1]), "the same gradients"


@pytest.mark.deep
def test_long_tail_leads_to_engines_of_several_sizes_with_length_buckets() -> None:
    tailed = EmulatedWorkload(
        workers=8, steps=40, log_sigma=LinearDrift(1.3, 1.3), training_speed="4000/20"
    )
    spec = replace(
        spec_of(tailed, 1),
        requirements=JobRequirements(tensor_parallel=(1, 2, 4)),
        has_length_buckets=True,
    )
    assert "lengths" in {one.details["policy"] for one in run_cluster(spec, workers=8).judged_moves}
    there = replace(
        spec, initial_tensor_parallel_sizes=(4, 2, 1), planner=replace(spec.planner, moves=False)
    )
    job = run_cluster(there, workers=8).jobs["job"]
    assert job.training.is_finished
    buckets = {
        place.engine.tensor_parallel_size: place.bucket for place in job.shards[0].engines.values()
    }
    assert buckets == {1: 0, 2: 1, 4: 2}, "short lengths for small degrees"


def test_decisions_are_applied_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[str] = []

    def recorded_decide(snapshot, memory):  # type: ignore[no-untyped-def]
        decisions, then = decide(snapshot, memory)
        formed.extend(one.gang for one in decisions if isinstance(one, FormGang))
        return decisions, then

    monkeypatch.setattr("meshrl.sim.cluster.model.cluster.decide", recorded_decide)
    run_cluster(spec_of(TRAINED, 1))
    assert formed[:4] == ["g0", "g1", "g2", "g3"] and len(formed) == len(set(formed))


def test_preempted_job_pauses_and_resumes_afterwards() -> None:
    first = replace(spec_of(TRAINED.with_static_split(0), 1), name="first")
    taking = replace(
        spec_of(TRAINED.with_static_split(0), 2),
        name="taking",
        requirements=JobRequirements(priority=1, min_workers=4),
    )
    cluster = SimCluster([SimHosts(1, 4)], [first, taking])
    cluster.run(3600.0)
    one, other = (cluster.jobs[name].training for name in ("first", "taking"))
    assert one.is_finished and other.is_finished
    assert one.step_ends_s[0] > other.step_ends_s[-1]


def test_failed_host_loses_its_engines_and_returns() -> None:
    spec = spec_of(
        replace(
            TRAINED.with_static_split(0),
            training_speed="4000/20",
            median_tokens=LinearDrift(200.0, 200.0),
        ),
        1,
    )
    whole = SimCluster([SimHosts(2, 4)], [spec])
    whole.run(3600.0)
    torn = SimCluster([SimHosts(2, 4)], [spec], failures=[SimFailure(1, 20.0, 60.0)])
    counts: list[int] = []
    for at_s in (19.0, 30.0, 120.0):
        torn.event_queue.schedule_at(at_s, lambda: counts.append(len(torn.jobs["job"].engines)))
    torn.run(3600.0)
    assert counts == [7, 3, 7]
    (one,), (other,) = whole.jobs.values(), torn.jobs.values()
    assert other.training.is_finished and other.training.step_ends_s != one.training.step_ends_s
    # its unfinished trajectories continued elsewhere from their tokens so far
    assert other.sampled_tokens == pytest.approx(one.sampled_tokens, rel=0.1)


def test_core_of_a_lost_host_continues_elsewhere() -> None:
    spec = spec_of(TRAINED.with_static_split(0), 1)
    cluster = SimCluster([SimHosts(2, 4)], [spec], failures=[SimFailure(0, 20.0, 0.0)])
    cluster.run(3600.0)
    (job,) = cluster.jobs.values()
    assert job.training.is_finished and job.training.version == spec.steps


def test_late_weights_serve_later_generation() -> None:
    soon, spec = run_trained(is_static=True), spec_of(TRAINED.with_static_split(0), 1)
    late = run_cluster(replace(spec, get_arrival_s=lambda kind, degree: 30.0))
    runs = [one.jobs["job"] for one in (soon, late)]
    assert all(job.training.is_finished for job in runs)
    assert runs[1].training.requeued_trajectories >= runs[0].training.requeued_trajectories
    assert runs[1].training.step_ends_s != runs[0].training.step_ends_s
    assert {engine.version for engine in runs[1].engines} != {spec.steps}, "the last ones are due"


@pytest.mark.deep
def test_job_of_many_engines_has_several_shards() -> None:
    spec = replace(spec_of(TRAINED.with_static_split(0), 1), groups_per_step=48, steps=3)
    job = run_cluster(spec, workers=150).jobs["job"]
    assert job.training.is_finished
    assert sorted(len(shard.engines) for shard in job.shards) == [21, 64, 64]
    assert all(shard.work_counter.trajectories for shard in job.shards)


class Costs:
    """Cost model of one token a second and half a second an update."""

    transfer_s = 0.0  # of a hybrid

    def predict_transfer_s(self) -> float:
        return self.transfer_s

    def count_replicas(self, workers: int, is_core: bool) -> int:
        return workers

    def predict_update_s(self) -> float:
        return 0.5

    def predict_gradient_s(self, trajectory_tokens: Sequence[float]) -> Sequence[float]:
        return trajectory_tokens


def training(agenda: EventQueue, steps: int = 4, staleness: int = 1) -> SimTraining:
    return SimTraining(agenda, Costs(), 2, 1, staleness, steps, lambda: None)


def end_group(job: SimTraining, number: int, length: float) -> None:
    job.end_trajectory(number, 0, length)


def test_gradients_are_computed_while_later_groups_generate() -> None:
    agenda = EventQueue()
    job = training(agenda)
    job.add_replicas("core", 1)
    first, second = job.admit_groups(2)
    agenda.schedule_at(1.0, partial(end_group, job, first.number, 4.0))
    agenda.schedule_at(10.0, partial(end_group, job, second.number, 3.0))
    agenda.run(100.0, lambda: False)
    assert job.step_ends_s == [13.5]  # not 17.5: the first group was computed by then
    work = job.work
    assert (work.work_s, work.wait_s, work.busy_s, work.tokens) == (7.0, 10.0, 3.5, 7.0)


def test_work_is_counted_when_it_ends() -> None:
    agenda = EventQueue()
    job = training(agenda)
    job.add_replicas("core", 1)
    for group in job.admit_groups(2):
        job.end_trajectory(group.number, 0, 4.0)
    for until_s, done_s in ((3.0, 0.0), (5.0, 4.0), (8.25, 8.0)):
        agenda.schedule_at(until_s, lambda: None)
        agenda.run(until_s, lambda: False)
        assert (job.work.work_s, job.work.tokens, job.version) == (done_s, done_s, 0)


def test_micro_batches_go_to_the_first_free_replica() -> None:
    agenda = EventQueue()
    job = training(agenda)
    job.add_replicas("core", 1)
    job.add_replicas("helper", 1)
    for group in job.admit_groups(2):
        job.end_trajectory(group.number, 0, 4.0)
    agenda.run(100.0, lambda: False)
    assert job.step_ends_s == [4.5]


@pytest.mark.parametrize(("transfer_s", "ends_s"), [(1.0, 5.5), (3.5, 8.0), (20.0, 8.5)])
def test_step_waits_for_the_transfer_of_a_hybrid_that_helps(
    transfer_s: float, ends_s: float
) -> None:
    agenda = EventQueue()
    job = training(agenda)
    job._training_speed.transfer_s = transfer_s  # type: ignore[attr-defined]
    job.add_replicas("core", 1)
    job.add_replicas("hybrid", 1, is_core=False)
    for group in job.admit_groups(2):
        job.end_trajectory(group.number, 0, 4.0)
    agenda.run(100.0, lambda: False)
    assert job.step_ends_s == [ends_s]


def test_gate_admits_only_groups_that_train_in_time() -> None:
    agenda = EventQueue()
    job = training(agenda, steps=3)
    assert [g.number for g in job.admit_groups(99)] == [0, 1, 2, 3] and not job.admit_groups(1)
    job.add_replicas("core", 1)
    job.end_trajectory(0, 0, 1.0)
    job.end_trajectory(1, 0, 1.0)
    agenda.run(100.0, lambda: False)
    assert job.version == 1 and [g.number for g in job.admit_groups(99)] == [4, 5]
    assert not job.admit_groups(1), "groups beyond the last step are not opened"


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000), staleness=st.integers(0, 3), workers=st.integers(1, 3))
def test_steps_train_only_groups_within_the_staleness_bound(
    seed: int, staleness: int, workers: int
) -> None:
    random, agenda = Random(seed), EventQueue()
    trained: list[int] = []  # versions between a group's first token and its step

    class RecordingTraining(SimTraining):
        def _commit(self, step: int) -> None:
            trained.extend(self.version - group.oldest_version for group in self._leased_groups)
            super()._commit(step)

    def open_group() -> None:
        for group in job.admit_groups(8):
            ends_s, oldest = random.expovariate(0.2), job.version
            number = group.number

            def end(number: int = number, oldest: int = oldest) -> None:
                job.end_trajectory(number, oldest, random.random())

            agenda.schedule_after(ends_s, end)

    def poll() -> None:
        open_group()
        agenda.schedule_after(0.1, poll)

    job = RecordingTraining(agenda, Costs(), 2, 1, staleness, 12, open_group)
    job.add_replicas("core", workers)
    poll()
    agenda.run(1e5, lambda: job.is_finished)
    assert job.is_finished and len(trained) == 24
    assert max(trained) <= staleness


def test_step_of_a_dead_core_is_repeated_with_the_same_groups() -> None:
    agenda = EventQueue()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 2, 2, lambda: made.append(agenda.now_s))
    job.add_replicas("core", 1)
    for group in job.admit_groups(2):
        job.end_trajectory(group.number, 0, 100.0)
    agenda.run(0.01, lambda: False)
    job.restart_step()
    job.remove_replicas("core")
    agenda.run(50.0, lambda: False)
    assert made == [] and job.version == 0
    agenda.schedule_at(60.0, lambda: job.add_replicas("other", 2))
    agenda.run(400.0, lambda: bool(made))
    assert job.version == 1 and made == [60.0 + 100.0 + 0.5], "what it had begun is nobody's"


def test_colocated_accelerators_train_when_all_groups_are_ready() -> None:
    agenda = EventQueue()
    made: list[float] = []
    job = SimTraining(agenda, Costs(), 2, 1, 0, 1, lambda: made.append(agenda.now_s), switch_s=5.0)
    job.add_replicas("core", 1)
    first, other = job.admit_groups(8)
    job.end_trajectory(first.number, 0, 1.0)
    agenda.schedule_at(10.0, partial(end_group, job, other.number, 1.0))
    agenda.run(100.0, lambda: job.is_finished)
    alone = sum(Costs().predict_gradient_s([1.0])) * 2 + Costs().predict_update_s()
    assert made == [pytest.approx(15.0 + alone)]


@dataclass(frozen=True)
class Linear:
    """Step time as a base plus a cost of each sequence and of its context."""

    base_s: float = 1.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    token_s: float = 0.0  # of prefill
    room: float = math.inf

    def predict_step_s(self, batch_size: float, context_tokens: float) -> float:
        return self.base_s + batch_size * (self.sequence_s + context_tokens * self.context_s)

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        return tokens * self.token_s

    def get_capacity_tokens(self) -> float:
        return self.room

    @property
    def plateau_batch(self) -> int:
        return 0

    def make_curve(self, steps: int) -> DecodeCurve:
        return DecodeCurve(
            "cpu", 1, self.base_s, self.sequence_s, self.context_s, fitted_steps=steps
        )


class Bench:
    """Engine on an event queue, with the end time of each request."""

    def __init__(self, speed: Linear, slots: int = 8) -> None:
        self.agenda = EventQueue()
        self.engine = SimEngine("e", self.agenda, speed, slots)
        self.end_times_s: dict[str, float] = {}

    def request(
        self, name: str, tokens: float, context: float = 0.0, cached: float = 0.0
    ) -> SimRequest:
        return SimRequest(tokens, context, cached, lambda: self._record_end(name))

    def _record_end(self, name: str) -> None:
        self.end_times_s[name] = self.agenda.now_s

    def run(self, until_s: float = 1e9) -> None:
        self.agenda.run(until_s, lambda: False)


def test_request_decodes_its_tokens_in_sequence() -> None:
    bench = Bench(Linear(base_s=0.5))
    bench.engine.submit(bench.request("a", 10))
    bench.run()
    assert bench.end_times_s == {"a": pytest.approx(5.0)}
    assert bench.engine.generated_tokens == pytest.approx(
        10
    ) and bench.engine.busy_s == pytest.approx(5.0)


def test_prefill_delays_all_requests_and_a_cached_prefix_avoids_it() -> None:
    bench = Bench(Linear(base_s=1.0, token_s=0.1))
    bench.engine.submit(bench.request("a", 10))
    bench.agenda.schedule_at(4.0, lambda: bench.engine.submit(bench.request("b", 3, context=20)))
    bench.agenda.schedule_at(8.0, lambda: bench.engine.submit(bench.request("c", 1, 50, cached=50)))
    bench.run()
    assert bench.end_times_s["a"] == pytest.approx(12.0)  # includes 2 s of prefill
    assert bench.end_times_s["b"] == pytest.approx(9.0)
    assert bench.end_times_s["c"] == pytest.approx(9.0)
    assert bench.engine.prefilled_tokens == 20


def test_request_without_a_slot_waits() -> None:
    bench = Bench(Linear(), slots=2)
    for name, tokens in (("a", 5), ("b", 3), ("c", 4)):
        bench.engine.submit(bench.request(name, tokens))
    assert (bench.engine.running, bench.engine.waiting) == (2, 1)
    bench.run()
    assert bench.end_times_s == {"b": 3.0, "a": 5.0, "c": 7.0}


def test_request_without_kv_memory_waits() -> None:
    bench = Bench(Linear(room=100))
    bench.engine.submit(bench.request("a", 40, context=30))
    bench.engine.submit(bench.request("b", 10, context=40))  # 30 + 50 fits, 70 + 50 does not
    bench.engine.submit(bench.request("c", 50, context=40))
    assert (bench.engine.running, bench.engine.waiting) == (2, 1)
    bench.run()
    assert bench.end_times_s == {"b": 10.0, "a": 40.0, "c": 90.0}


def test_released_request_keeps_its_generated_tokens() -> None:
    bench = Bench(Linear(base_s=0.5))
    one, other = bench.request("a", 10, context=4), bench.request("b", 10)
    bench.engine.submit(one)
    bench.engine.submit(other)
    bench.run(2.0)
    bench.engine.release(one)
    assert (one.made_tokens, one.remaining_tokens, one.context_tokens) == (4.0, 6.0, 8.0)
    bench.run(3.0)
    assert bench.engine.release_all() == [other] and other.made_tokens == pytest.approx(6.0)
    bench.run()
    assert not bench.end_times_s


def test_blocked_engine_decodes_nothing() -> None:
    bench = Bench(Linear())
    bench.engine.submit(bench.request("a", 10))
    bench.agenda.schedule_at(4.0, lambda: bench.engine.block(2.5))
    bench.run()
    assert bench.end_times_s == {"a": 12.5}


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(0, 50)),
        min_size=1,
        max_size=12,
    ),
    slots=st.integers(1, 4),
)
def test_engine_matches_a_token_by_token_simulation(
    arrivals: list[tuple[int, int, int]], slots: int
) -> None:
    bench = Bench(Linear(), slots)
    order = sorted(range(len(arrivals)), key=lambda n: arrivals[n][0])
    for n in order:
        at_s, tokens, context = arrivals[n]
        request = bench.request(str(n), tokens, context)
        bench.agenda.schedule_at(float(at_s), partial(bench.engine.submit, request))
    bench.run()
    waiting, now = list(order), 0
    running: dict[int, int] = {}
    expected: dict[str, float] = {}
    while waiting or running:
        for n in [n for n in waiting if arrivals[n][0] <= now][: slots - len(running)]:
            waiting.remove(n)
            running[n] = arrivals[n][1]
        now += 1
        for n in list(running):
            running[n] -= 1
            if not running[n]:
                del running[n]
                expected[str(n)] = float(now)
    assert bench.end_times_s == pytest.approx(expected)
