"""Accounts of trajectories, of residents' memory and of measured work."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import (
    VIOLATIONS,
    compute_account,
    format_violations,
)
from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    DecodeCurve,
    LengthQuantiles,
    MeasuredWork,
    decode_curve,
    decode_lengths,
    decode_work,
    encode_work,
    merge_lengths,
    parse_accelerator_kind,
)
from meshrl.common.state.pool.demand.planned_jobs import ProcessStats, collect_measurements
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.common.state.pool.scheduling.feasibility import (
    estimate_accelerator_bytes,
    estimate_offload_bytes,
)
from meshrl.common.state.pool.workers.rows import Instance, Role

SHARD = MeasuredWork(
    groups=3, trajectories=12, sampled=480, flight_s=31.25, engine_s=20.0, queue_s=1.5
)
CURVE = DecodeCurve("NVIDIA H200", 4, 0.0123456, 0.00098765, 1.23456e-7, 6123.4, 400)


def story(*told: tuple[str, dict[str, Any]]) -> list[Event]:
    return [
        Event(f"{n}-0", n, kind, {"job": "j"} | fields) for n, (kind, fields) in enumerate(told)
    ]


def opened(*groups: int, samples: int = 4) -> tuple[str, dict[str, Any]]:
    return "opened", {"groups": list(groups), "samples": samples}


def step(number: int, *groups: int, scored: int = 4, filtered: bool = False) -> Any:
    rows = [
        {"group": group, "samples": 4, "scored": scored, "filtered": filtered} for group in groups
    ]
    return "step", {"step": number, "groups": rows}


def test_each_end_of_a_group_is_a_term_of_its_own() -> None:
    terms = compute_account(
        story(
            opened(0, 1, 2, 3, 4, 5),
            step(1, 0),
            step(2, 1, filtered=True),
            ("stale", {"groups": [{"group": 2, "samples": 4}]}),
            ("requeued", {"group": 3, "samples": 4}),
            ("dropped", {"group": 4, "samples": 4}),
        ),
        in_flight=4,
    )
    assert terms == {
        "opened": 24,
        "trained": 4,
        "filtered": 4,
        "stale_requeued": 4,
        "host_lost": 4,
        "typed_drops": 4,
        "in_flight": 4,
        "lost": 0,
        "trained_twice": 0,
        "opened_twice": 0,
        "committed_twice": 0,
    }


@pytest.mark.parametrize(
    ("told", "in_flight", "terms"),
    [
        ([], 0, dict.fromkeys(compute_account([], 0), 0)),
        ([opened(0, 1), step(1, 0)], 0, {"lost": 4}),
        ([opened(0), step(1, 0, scored=3)], 0, {"trained": 3, "typed_drops": 1, "lost": 0}),
        ([opened(0, 1), step(1, 0), step(2, 0)], 0, {"trained_twice": 4}),
        (
            [opened(0, 1, 2), step(1, 0), step(2, 1), ("lineage", {"version": 1}), step(2, 1)],
            4,
            {"trained": 8, "lost": 0, "trained_twice": 0},
        ),
    ],
    ids=["nothing", "lost", "unscored members", "trained twice", "abandoned lineage"],
)
def test_every_trajectory_counts_once_wherever_it_ended(
    told: list[tuple[str, dict[str, object]]], in_flight: int, terms: dict[str, int]
) -> None:
    assert compute_account(story(*told), in_flight).items() >= terms.items()


def test_a_restored_job_begins_with_its_checkpoints_counts() -> None:
    counts = {
        "opened": 8,
        "trained": 4,
        "filtered": 0,
        "stale_requeued": 0,
        "host_lost": 4,
        "typed_drops": 0,
    }
    terms = compute_account(
        story(opened(9), ("restored", {"counts": counts}), opened(1)), in_flight=4
    )
    assert (terms["opened"], terms["trained"], terms["lost"]) == (12, 4, 0)


def test_other_jobs_are_left_out_when_one_is_asked_for() -> None:
    told = story(opened(0), ("opened", {"job": "other", "groups": [0], "samples": 2}))
    assert compute_account(told, in_flight=4, job="j")["opened"] == 4
    assert compute_account(told, in_flight=6)["opened"] == 6


def test_a_version_has_one_manifest_in_a_lineage_and_a_group_number_is_given_once() -> None:
    def commit(lineage: int, manifest: str, group: int) -> Any:
        kind, fields = step(1, group)
        return kind, fields | {"lineage": lineage, "manifest": manifest}

    good = story(opened(0, 1, 2), commit(0, "a", 0), ("lineage", {"version": 0}), commit(1, "b", 1))
    assert format_violations(compute_account(good, in_flight=8)) == ""
    counts = {"opened": 0, "trained": 0, "filtered": 0, "stale_requeued": 0, "host_lost": 0}
    restored = ("restored", {"version": 0, "counts": counts | {"typed_drops": 0}})
    told = story(opened(0, 1), commit(0, "a", 0), restored, opened(1, 2), commit(0, "b", 1))
    terms = compute_account(told, in_flight=4)
    assert {key: terms[key] for key in VIOLATIONS} == {
        "lost": 0,
        "trained_twice": 0,
        "opened_twice": 1,
        "committed_twice": 1,
    }
    assert "opened_twice = 1" in format_violations(terms) and "lost" not in format_violations(terms)


def test_a_core_whose_experts_lie_apart_is_not_refused_for_a_part_that_nobody_knows() -> None:
    alike, apart = (
        JobRequirements(ranks=4, parameter_bytes=1000),
        JobRequirements(ranks=4, attention_ranks=2, parameter_bytes=1000),
    )
    assert (
        estimate_accelerator_bytes(Role.TRAINING, True, 4, alike) == 1000
    )  # weights, gradients and two moments
    assert estimate_accelerator_bytes(Role.TRAINING, True, 4, apart) == 0
    assert (
        estimate_accelerator_bytes(Role.TRAINING, False, 1, apart)
        == estimate_accelerator_bytes(Role.TRAINING, False, 1, alike)
        == 2000
    )
    core = Instance("g0.0", "j", Role.TRAINING, core=True, ranks=(0, 1, 2, 3))
    assert (estimate_offload_bytes(core, alike), estimate_offload_bytes(core, apart)) == (750, 1500)


def test_only_what_there_is_is_published_and_it_reads_the_same() -> None:
    assert encode_work(MeasuredWork()) == {}
    assert encode_work(MeasuredWork(steps=2, wait_s=0.12345)) == {"steps": 2, "wait_s": 0.123}
    assert decode_work(encode_work(SHARD)) == SHARD
    assert decode_work({**encode_work(SHARD), "of_a_later_version": 1.0}) == SHARD


def test_a_curve_is_published_in_few_digits() -> None:
    read = decode_curve(CURVE.accelerator_kind, CURVE.encode())
    assert (read.accelerator_kind, read.tensor_parallel, read.fitted_steps) == (
        "NVIDIA H200",
        4,
        400,
    )
    assert read.predict_step_s(8, 500) == pytest.approx(CURVE.predict_step_s(8, 500), rel=1e-3)
    assert len(str(CURVE.encode())) < 60


def test_lengths_are_published_in_short_and_those_of_shards_are_one() -> None:
    short = LengthQuantiles(100, tuple(float(n) for n in range(len(QUANTILES))), 20.0)
    long = LengthQuantiles(300, tuple(4.0 * n for n in range(len(QUANTILES))), 40.0)
    assert decode_lengths(short.encode()) == short and len(str(short.encode())) < 120
    both = merge_lengths([short, long])
    assert both is not None and (both.trajectories, both.mean_prompt_tokens) == (400, 35.0)
    assert both.sampled_tokens[-1] == pytest.approx(3.25 * short.sampled_tokens[-1])
    assert merge_lengths([]) is None


def test_a_kind_of_accelerators_is_what_they_are_and_not_which() -> None:
    assert [
        parse_accelerator_kind(name) for name in ("cpu:0", "cuda:1 NVIDIA H200", "simulated", "")
    ] == [
        "cpu",
        "NVIDIA H200",
        "simulated",
        "",
    ]


def test_a_process_that_starts_again_is_another_one_and_engines_have_their_gangs_kind() -> None:
    def process(name: str, incarnation: str, **stats: object) -> ProcessStats:
        return ProcessStats(name, name.partition("/")[0], incarnation, stats)

    found = collect_measurements(
        [
            process("rollout/j/0", "a", work=encode_work(SHARD)),
            process("trainer/g1.0", "b", work=encode_work(MeasuredWork(steps=1))),
            process("engine/g0.0", "c", gang="g0", curve=CURVE.encode()),
            process("engine/g2.0", "d", gang="g2"),
        ],
        {"g0": "NVIDIA H200"},
    )
    assert found.work_by_process == {"rollout/j/0a": SHARD, "trainer/g1.0b": MeasuredWork(steps=1)}
    assert [(curve.accelerator_kind, curve.tensor_parallel) for curve in found.curves] == [
        ("NVIDIA H200", 4)
    ]
