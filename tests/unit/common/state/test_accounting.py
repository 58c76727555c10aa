"""Accounting of trajectories, of instances' memory and of measured work."""

from __future__ import annotations

from dataclasses import replace
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
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.feasibility import (
    estimate_accelerator_bytes,
    estimate_offload_bytes,
)
from meshrl.common.state.pool.workers.rows import Instance, Role

SHARD = MeasuredWork(
    groups=3, trajectories=12, sampled=480, flight_s=31.25, engine_s=20.0, queue_s=1.5
)
CURVE = DecodeCurve("NVIDIA H200", 4, 0.0123456, 0.00098765, 1.23456e-7, 6123.4, 400)


def make_events(*recorded: tuple[str, dict[str, Any]]) -> list[Event]:
    return [
        Event(f"{n}-0", n, kind, {"job": "j"} | fields) for n, (kind, fields) in enumerate(recorded)
    ]


def opened_event(*groups: int, samples: int = 4) -> tuple[str, dict[str, Any]]:
    return "opened", {"groups": list(groups), "samples": samples}


def step_event(number: int, *groups: int, scored: int = 4, filtered: bool = False) -> Any:
    rows = [
        {"group": group, "samples": 4, "scored": scored, "filtered": filtered} for group in groups
    ]
    return "step", {"step": number, "groups": rows}


def test_each_group_outcome_is_a_separate_term() -> None:
    terms = compute_account(
        make_events(
            opened_event(0, 1, 2, 3, 4, 5),
            step_event(1, 0),
            step_event(2, 1, filtered=True),
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
    ("recorded", "in_flight", "terms"),
    [
        ([], 0, dict.fromkeys(compute_account([], 0), 0)),
        ([opened_event(0, 1), step_event(1, 0)], 0, {"lost": 4}),
        (
            [opened_event(0), step_event(1, 0, scored=3)],
            0,
            {"trained": 3, "typed_drops": 1, "lost": 0},
        ),
        ([opened_event(0, 1), step_event(1, 0), step_event(2, 0)], 0, {"trained_twice": 4}),
        (
            [
                opened_event(0, 1, 2),
                step_event(1, 0),
                step_event(2, 1),
                ("lineage", {"version": 1}),
                step_event(2, 1),
            ],
            4,
            {"trained": 8, "lost": 0, "trained_twice": 0},
        ),
    ],
    ids=["nothing", "lost", "unscored members", "trained twice", "abandoned lineage"],
)
def test_every_trajectory_counts_once(
    recorded: list[tuple[str, dict[str, object]]], in_flight: int, terms: dict[str, int]
) -> None:
    assert compute_account(make_events(*recorded), in_flight).items() >= terms.items()


def test_restored_job_starts_with_its_checkpoints_counts() -> None:
    counts = {
        "opened": 8,
        "trained": 4,
        "filtered": 0,
        "stale_requeued": 0,
        "host_lost": 4,
        "typed_drops": 0,
    }
    terms = compute_account(
        make_events(opened_event(9), ("restored", {"counts": counts}), opened_event(1)), in_flight=4
    )
    assert (terms["opened"], terms["trained"], terms["lost"]) == (12, 4, 0)


def test_account_of_one_job_excludes_other_jobs() -> None:
    recorded = make_events(
        opened_event(0), ("opened", {"job": "other", "groups": [0], "samples": 2})
    )
    assert compute_account(recorded, in_flight=4, job="j")["opened"] == 4
    assert compute_account(recorded, in_flight=6)["opened"] == 6


def test_repeated_versions_and_group_numbers_are_violations() -> None:
    def commit(lineage: int, manifest: str, group: int) -> Any:
        kind, fields = step_event(1, group)
        return kind, fields | {"lineage": lineage, "manifest": manifest}

    valid_events = make_events(
        opened_event(0, 1, 2), commit(0, "a", 0), ("lineage", {"version": 0}), commit(1, "b", 1)
    )
    assert format_violations(compute_account(valid_events, in_flight=8)) == ""
    counts = {"opened": 0, "trained": 0, "filtered": 0, "stale_requeued": 0, "host_lost": 0}
    restored = ("restored", {"version": 0, "counts": counts | {"typed_drops": 0}})
    recorded = make_events(
        opened_event(0, 1), commit(0, "a", 0), restored, opened_event(1, 2), commit(0, "b", 1)
    )
    terms = compute_account(recorded, in_flight=4)
    assert {key: terms[key] for key in VIOLATIONS} == {
        "lost": 0,
        "trained_twice": 0,
        "opened_twice": 1,
        "committed_twice": 1,
    }
    assert "opened_twice = 1" in format_violations(terms) and "lost" not in format_violations(terms)


def test_offloaded_core_takes_its_rows_on_each_worker() -> None:
    memory = RoleMemory(core=900, core_state=3000, hybrid=2000, scoring=70, engines={2: 80})
    uniform = JobRequirements(ranks=4, memory=memory)
    split = replace(uniform, attention_ranks=2)
    core = Instance("g0.0", "j", Role.TRAINING, core=True, ranks=(0, 1, 2, 3))
    assert estimate_offload_bytes(core, uniform) == 750
    assert estimate_offload_bytes(core, split) == 1500, "experts have nearly all parameters"
    cases = [
        (Role.TRAINING, True, 4, 900),
        (Role.TRAINING, False, 1, 2000),
        (Role.ROLLOUT, False, 2, 80),
        (Role.ROLLOUT, False, 1, 0),
        (Role.SCORING, False, 1, 70),
    ]
    for role, is_core, ranks, size_bytes in cases:
        assert estimate_accelerator_bytes(role, is_core, ranks, uniform) == size_bytes


def test_only_nonzero_work_is_encoded_and_it_round_trips() -> None:
    assert encode_work(MeasuredWork()) == {}
    assert encode_work(MeasuredWork(steps=2, wait_s=0.12345)) == {"steps": 2, "wait_s": 0.123}
    assert decode_work(encode_work(SHARD)) == SHARD
    assert decode_work({**encode_work(SHARD), "of_a_later_version": 1.0}) == SHARD


def test_decode_curve_is_encoded_in_few_digits() -> None:
    decoded = decode_curve(CURVE.accelerator_kind, CURVE.encode())
    assert (decoded.accelerator_kind, decoded.tensor_parallel, decoded.fitted_steps) == (
        "NVIDIA H200",
        4,
        400,
    )
    assert decoded.predict_step_s(8, 500) == pytest.approx(CURVE.predict_step_s(8, 500), rel=1e-3)
    assert len(str(CURVE.encode())) < 60


def test_lengths_are_encoded_compactly_and_merged_over_shards() -> None:
    short = LengthQuantiles(100, tuple(float(n) for n in range(len(QUANTILES))), 20.0)
    long = LengthQuantiles(300, tuple(4.0 * n for n in range(len(QUANTILES))), 40.0)
    assert decode_lengths(short.encode()) == short and len(str(short.encode())) < 120
    merged = merge_lengths([short, long])
    assert merged is not None and (merged.trajectories, merged.mean_prompt_tokens) == (400, 35.0)
    assert merged.sampled_tokens[-1] == pytest.approx(3.25 * short.sampled_tokens[-1])
    assert merge_lengths([]) is None


def test_accelerator_kind_omits_the_device_index() -> None:
    assert [
        parse_accelerator_kind(name) for name in ("cpu:0", "cuda:1 NVIDIA H200", "simulated", "")
    ] == [
        "cpu",
        "NVIDIA H200",
        "simulated",
        "",
    ]


def test_measurements_are_keyed_by_incarnation_and_use_the_gangs_accelerator() -> None:
    def make_stats(name: str, incarnation: str, **stats: object) -> ProcessStats:
        return ProcessStats(name, name.partition("/")[0], incarnation, stats)

    measurements = collect_measurements(
        [
            make_stats("rollout/j/0", "a", work=encode_work(SHARD)),
            make_stats("trainer/g1.0", "b", work=encode_work(MeasuredWork(steps=1))),
            make_stats("engine/g0.0", "c", gang="g0", decode_curve=CURVE.encode()),
            make_stats("engine/g2.0", "d", gang="g2"),
        ],
        {"g0": "NVIDIA H200"},
    )
    assert measurements.work_by_process == {
        "rollout/j/0a": SHARD,
        "trainer/g1.0b": MeasuredWork(steps=1),
    }
    assert [(curve.accelerator_kind, curve.tensor_parallel) for curve in measurements.curves] == [
        ("NVIDIA H200", 4)
    ]
