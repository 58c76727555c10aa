"""Merge policy of an engine: adapters are merged while that is cheaper than separate
computation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, LoraConfig, RolloutConfig
from meshrl.services.engine.role_process import _choose_adapter_mode
from meshrl.services.engine.weights.merge_policy import (
    OVERHEAD_SHARE,
    SWITCH_MARGIN,
    AdapterMode,
    MergePolicy,
    is_merging_worthwhile,
)
from tests.unit.common.generation.engines_under_test import ManualClock


@pytest.mark.parametrize("merging", [True, False])
def test_unmeasured_adapters_are_merged(merging: bool) -> None:
    assert is_merging_worthwhile(merging, 0.0, 10.0) and is_merging_worthwhile(merging, 5.0, 0.0)


def test_mode_switches_only_with_a_clear_advantage() -> None:
    even_s = OVERHEAD_SHARE * 100.0
    assert is_merging_worthwhile(True, even_s * SWITCH_MARGIN * 0.99, 100.0)
    assert not is_merging_worthwhile(True, even_s * SWITCH_MARGIN * 1.01, 100.0)
    assert not is_merging_worthwhile(False, even_s / SWITCH_MARGIN * 1.01, 100.0)
    assert is_merging_worthwhile(False, even_s / SWITCH_MARGIN * 0.99, 100.0)


def observe_versions(
    policy: MergePolicy, clock: ManualClock, times: int, merge_s: float
) -> list[bool]:
    decisions = []
    for _ in range(times):
        clock.advance(10.0)
        decisions.append(policy.observe_version(f"{clock.monotonic()}"))
        if decisions[-1]:
            policy.record_merge_time(merge_s)
    return decisions


def test_mode_follows_the_measured_merge_time() -> None:
    clock = ManualClock()
    assert observe_versions(MergePolicy("auto", clock), clock, 4, 0.5) == [True] * 4
    assert observe_versions(MergePolicy("auto", clock), clock, 4, 5.0) == [
        True,
        False,
        False,
        False,
    ]


def test_repeated_version_counts_once() -> None:
    clock = ManualClock()
    policy = MergePolicy("auto", clock)
    assert observe_versions(policy, clock, 3, 0.5) == [True] * 3
    clock.advance(10.0)
    for _ in range(9):
        assert policy.observe_version("again")
        clock.advance(0.001)
    clock.advance(10.0)
    assert policy.observe_version("next"), "versions are still seconds apart"


def test_configured_mode_is_not_changed() -> None:
    clock = ManualClock()
    assert observe_versions(MergePolicy("merged", clock), clock, 3, 500.0) == [True] * 3
    assert observe_versions(MergePolicy("beside", clock), clock, 3, 0.001) == [False] * 3


@pytest.mark.parametrize(
    ("engine", "requested_mode", "mode"),
    [
        ("torch", "auto", "auto"),
        ("torch", "beside", "beside"),
        ("sglang", "auto", "merged"),
        ("sglang", "merged", "merged"),
        ("sglang", "beside", "beside"),
    ],
)
def test_sglang_server_started_without_adapters_always_merges(
    engine: Literal["torch", "sglang"],
    requested_mode: AdapterMode,
    mode: AdapterMode,
    tmp_path: Path,
) -> None:
    config = JobConfig(
        rollout=RolloutConfig(engine=engine), lora=LoraConfig(rank=4, engine_mode=requested_mode)
    )
    assert _choose_adapter_mode(JobData("job", config, tmp_path, tmp_path)) == mode
