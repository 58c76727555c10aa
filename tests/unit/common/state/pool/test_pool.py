"""Memory of residents, and measurements of processes."""

from __future__ import annotations

import pytest

from meshrl.common.state.pool.demand.measured import (
    LEVELS,
    Curve,
    Lengths,
    MeasuredWork,
    curve_of,
    kind_of,
    lengths_of,
    together,
    told,
    work_of,
)
from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.demand.planned import PublishedStats, measured
from meshrl.common.state.pool.placing.fitting import sleeps, takes
from meshrl.common.state.pool.workers.rows import Resident, Role

SHARD = MeasuredWork(
    groups=3, trajectories=12, sampled=480, flight_s=31.25, engine_s=20.0, queue_s=1.5
)
CURVE = Curve("NVIDIA H200", 4, 0.0123456, 0.00098765, 1.23456e-7, 6123.4, 400)


def test_a_core_whose_experts_lie_apart_is_not_refused_for_a_part_that_nobody_knows() -> None:
    alike, apart = Need(ranks=4, bytes=1000), Need(ranks=4, attention=2, bytes=1000)
    assert takes(Role.TRAINING, True, 4, alike) == 1000  # weights, gradients and two moments
    assert takes(Role.TRAINING, True, 4, apart) == 0
    assert takes(Role.TRAINING, False, 1, apart) == takes(Role.TRAINING, False, 1, alike) == 2000
    core = Resident("g0.0", "j", Role.TRAINING, core=True, ranks=(0, 1, 2, 3))
    assert (sleeps(core, alike), sleeps(core, apart)) == (750, 1500)


def test_only_what_there_is_is_published_and_it_reads_the_same() -> None:
    assert told(MeasuredWork()) == {}
    assert told(MeasuredWork(steps=2, wait_s=0.12345)) == {"steps": 2, "wait_s": 0.123}
    assert work_of(told(SHARD)) == SHARD
    assert work_of({**told(SHARD), "of_a_later_version": 1.0}) == SHARD


def test_a_curve_is_published_in_few_digits() -> None:
    read = curve_of(CURVE.kind, CURVE.told())
    assert (read.kind, read.degree, read.steps) == ("NVIDIA H200", 4, 400)
    assert read.step_s(8, 500) == pytest.approx(CURVE.step_s(8, 500), rel=1e-3)
    assert len(str(CURVE.told())) < 60


def test_lengths_are_published_in_short_and_those_of_shards_are_one() -> None:
    short = Lengths(100, tuple(float(n) for n in range(len(LEVELS))), 20.0)
    long = Lengths(300, tuple(4.0 * n for n in range(len(LEVELS))), 40.0)
    assert lengths_of(short.told()) == short and len(str(short.told())) < 120
    both = together([short, long])
    assert both is not None and (both.count, both.prompt) == (400, 35.0)
    assert both.sampled[-1] == pytest.approx(3.25 * short.sampled[-1])
    assert together([]) is None


def test_a_kind_of_accelerators_is_what_they_are_and_not_which() -> None:
    assert [kind_of(name) for name in ("cpu:0", "cuda:1 NVIDIA H200", "simulated", "")] == [
        "cpu",
        "NVIDIA H200",
        "simulated",
        "",
    ]


def test_a_process_that_starts_again_is_another_one_and_engines_have_their_gangs_kind() -> None:
    def process(name: str, incarnation: str, **stats: object) -> PublishedStats:
        return PublishedStats(name, name.partition("/")[0], incarnation, stats)

    found = measured(
        [
            process("rollout/j/0", "a", work=told(SHARD)),
            process("trainer/g1.0", "b", work=told(MeasuredWork(steps=1))),
            process("engine/g0.0", "c", gang="g0", curve=CURVE.told()),
            process("engine/g2.0", "d", gang="g2"),
        ],
        {"g0": "NVIDIA H200"},
    )
    assert found.work == {"rollout/j/0a": SHARD, "trainer/g1.0b": MeasuredWork(steps=1)}
    assert [(curve.kind, curve.degree) for curve in found.curves] == [("NVIDIA H200", 4)]
