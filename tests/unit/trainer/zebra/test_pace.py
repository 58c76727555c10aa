"""What tasks and transfers take on a rank that stands for a declared accelerator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.kinds import declared_profile
from meshrl.common.hardware.zebra.profile import Profile
from meshrl.common.hardware.zebra.schedule import TaskKind
from meshrl.common.hardware.zebra.together import expert_parallel_s, reduced_s
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.services.trainer.zebra.alike import PacedBins
from meshrl.services.trainer.zebra.pace import ZebraPace, pace_of
from meshrl.sim.zebra.setups import MODELS
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.zebra.cases import CASES, QWEN, bins

PROFILE = declared_profile(MODELS["D1"].shape, "A40", "V100", link_bytes_per_s=1e9)


def paced(profile: Profile, tokens: float = 1.0) -> ZebraPace:
    return ZebraPace(profile, profile.fast, tokens)


def test_tasks_take_what_the_kind_takes_times_the_scale_and_more_on_the_way_back() -> None:
    pace = paced(PROFILE.slowed(100.0), tokens=64.0)
    assert PROFILE.fast.attention is not None and PROFILE.fast.head is not None
    forward = pace.task_s(TaskKind.ATTENTION, False, [64, 32])
    expected = PROFILE.fast.attention.of(4096) + PROFILE.fast.attention.of(2048)
    assert forward == pytest.approx(100.0 * expected)
    backward = pace.task_s(TaskKind.ATTENTION, True, [64, 32])
    assert backward == pytest.approx(PROFILE.backward * forward)
    slow = ZebraPace(PROFILE, PROFILE.slowed(100.0).slow, tokens=64.0)
    hosted = pace.task_s(TaskKind.HOSTED, False, [8, 0, 16])
    assert hosted == pytest.approx(100.0 * PROFILE.fast.experts.of(24 * 64))
    assert slow.task_s(TaskKind.EXPERTS, False, [24]) == pytest.approx(hosted / 0.8)
    head = pace.head_s(64, goes_back=False)
    assert head == pytest.approx(100.0 * PROFILE.fast.head.of(4096))
    assert pace.head_s(64, goes_back=True) == pytest.approx(3 * head)


def test_transfers_take_their_bytes_over_the_link() -> None:
    pace = paced(PROFILE.slowed(10.0), tokens=2.0)
    expected = PROFILE.link_latency_s + 100 * 2 * PROFILE.row_bytes / 1e9
    assert pace.transfer_s(100) == pytest.approx(10.0 * expected)


def test_what_takes_a_tenth_longer_is_late() -> None:
    pace = ZebraPace(PROFILE, PROFILE.fast)
    for took_s in (1.0, 1.05, 1.3):
        pace.took(1.0, took_s)
    assert (pace.paced, pace.late) == (3, 1)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_bin_takes_what_a_micro_batch_of_expert_parallelism_is_predicted_to(degree: int) -> None:
    step_s = expert_parallel_s(PROFILE, {4096: 8}, [PROFILE.fast], 4, degree, 1)
    experts = PROFILE.layers * PROFILE.experts / degree * PROFILE.expert_gradient_bytes
    summed_s = reduced_s(PROFILE, PROFILE.attention_gradient_bytes, 4)
    summed_s += reduced_s(PROFILE, experts, 4 // degree)
    assert step_s is not None
    assert paced(PROFILE).bin_s([4096, 4096], degree) == pytest.approx(step_s - summed_s)


def test_bins_are_padded_to_their_pace_and_scores_to_a_part_of_it() -> None:
    given = bins(CASES["even"], 0)[:1]
    lengths = given[0].lengths.tolist()
    pace = paced(PROFILE.slowed(0.05 / paced(PROFILE).bin_s(lengths, 1)))
    padded = PacedBins(pace, 1, SystemClock())
    began_s = time.monotonic()
    with padded.of(given, back=True):
        pass
    assert time.monotonic() - began_s >= 0.05
    assert 0 < pace.bin_s(lengths, 1, back=False) < 0.02
    with padded.of(given, back=False):
        time.sleep(0.1)
    assert pace.paced == 2 and pace.late >= 1


def test_a_rank_keeps_the_pace_of_the_accelerator_that_its_slot_stands_for(tmp_path: Path) -> None:
    hundred = job(tmp_path, "declared/100")
    fast, slow = (pace_of(hundred, f"cpu:1 {name}") for name in ("L40S", "T4"))
    assert fast is not None and slow is not None
    assert (fast.kind.name, slow.kind.name) == ("L40S", "T4")
    assert slow.kind.experts.of(8) == pytest.approx(7 * fast.kind.experts.of(8))
    twice = pace_of(job(tmp_path, "declared/200"), "cpu:1 T4")
    assert twice is not None
    assert twice.bin_s([32], 1) == pytest.approx(2 * slow.bin_s([32], 1))
    longer = pace_of(job(tmp_path, "declared/100/4"), "cpu:1 T4")
    assert longer is not None
    assert longer.bin_s([32], 1) == pytest.approx(slow.bin_s([128], 1))
    assert pace_of(job(tmp_path, ""), "cpu:1") is None
    for unknown in ("cpu:1", "cuda:0 Something", ""):
        with pytest.raises(ConfigError, match="MESHRL_STAND_FOR"):
            pace_of(hundred, unknown)


def job(directory: Path, pace: str) -> JobData:
    make_tokenizer(directory)
    document: dict[str, Any] = {
        "name": "it",
        "model": {"config": QWEN},
        "training": {"ranks": 2, "pace": pace},
    }
    return JobData("it", JobConfig.from_document(document), directory, directory)
