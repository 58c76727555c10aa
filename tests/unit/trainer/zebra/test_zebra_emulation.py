"""Task and transfer times of a rank that emulates a declared accelerator."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.hardware.zebra.declared_profiles import build_declared_profile
from meshrl.common.hardware.zebra.expert_parallel import (
    compute_all_reduce_s,
    compute_expert_parallel_s,
)
from meshrl.common.hardware.zebra.profile import MixtureProfile, parse_accelerator_costs
from meshrl.common.hardware.zebra.schedule import TaskKind
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.job.emulation import (
    TRAINING_PROFILES,
    EmulatedTrainingSpeed,
    parse_training_speed,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.trainer.compute.piece_runner import EmulationTimer, PieceRunner
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.zebra import accelerator_profile
from meshrl.services.trainer.zebra.accelerator_profile import measure_profile
from meshrl.services.trainer.zebra.emulated_bins import EmulatedBins
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation, build_emulation
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.zebra.paper_setups import MODELS
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.ranks.batches_under_test import BINS, bins_of_step, fresh_learner
from tests.unit.trainer.zebra.cases import CASES, MIXTRAL, QWEN, SHARED, bins

PROFILE = build_declared_profile(MODELS["D1"].shape, "A40", "V100", link_bytes_per_s=1e9)


def create_emulator(profile: MixtureProfile, tokens: float = 1.0) -> ZebraEmulation:
    return ZebraEmulation(profile, profile.fast, tokens)


def test_task_time_is_the_scaled_profile_and_longer_backward() -> None:
    speed = create_emulator(PROFILE.scale_time(100.0), tokens=64.0)
    assert PROFILE.fast.attention is not None and PROFILE.fast.head is not None
    forward = speed.predict_task_s(TaskKind.ATTENTION, False, [64, 32])
    expected = PROFILE.fast.attention.interpolate_s(4096) + PROFILE.fast.attention.interpolate_s(
        2048
    )
    assert forward == pytest.approx(100.0 * expected)
    backward = speed.predict_task_s(TaskKind.ATTENTION, True, [64, 32])
    assert backward == pytest.approx(PROFILE.backward * forward)
    slow = ZebraEmulation(PROFILE, PROFILE.scale_time(100.0).slow, token_scale=64.0)
    hosted = speed.predict_task_s(TaskKind.HOSTED, False, [8, 0, 16])
    assert hosted == pytest.approx(100.0 * PROFILE.fast.experts.interpolate_s(24 * 64))
    assert slow.predict_task_s(TaskKind.EXPERTS, False, [24]) == pytest.approx(hosted / 0.8)
    head = speed.predict_head_s(64, with_backward=False)
    assert head == pytest.approx(100.0 * PROFILE.fast.head.interpolate_s(4096))
    assert speed.predict_head_s(64, with_backward=True) == pytest.approx(3 * head)


def test_transfer_time_is_bytes_over_bandwidth() -> None:
    speed = create_emulator(PROFILE.scale_time(10.0), tokens=2.0)
    expected = PROFILE.link_latency_s + 100 * 2 * PROFILE.row_bytes / 1e9
    assert speed.predict_transfer_s(100) == pytest.approx(10.0 * expected)


def test_task_with_ten_percent_overrun_is_late() -> None:
    speed = ZebraEmulation(PROFILE, PROFILE.fast)
    for took_s in (1.0, 1.05, 1.3):
        speed.record(1.0, took_s)
    assert (speed.emulated_steps, speed.late_steps) == (3, 1)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_bin_time_equals_the_predicted_micro_batch_time(degree: int) -> None:
    step_s = compute_expert_parallel_s(PROFILE, {4096: 8}, [PROFILE.fast], 4, degree, 1)
    experts = PROFILE.layers * PROFILE.experts / degree * PROFILE.expert_gradient_bytes
    summed_s = compute_all_reduce_s(PROFILE, PROFILE.attention_gradient_bytes, 4)
    summed_s += compute_all_reduce_s(PROFILE, experts, 4 // degree)
    assert step_s is not None
    assert create_emulator(PROFILE).predict_bin_s([4096, 4096], degree) == pytest.approx(
        step_s - summed_s
    )


def test_bins_and_scores_are_padded_to_their_emulated_time() -> None:
    given = bins(CASES["even"], 0)[:1]
    lengths = given[0].lengths.tolist()
    speed = create_emulator(
        PROFILE.scale_time(0.05 / create_emulator(PROFILE).predict_bin_s(lengths, 1))
    )
    padded = EmulatedBins(speed, 1, SystemClock())
    began_s = time.monotonic()
    with padded.emulate(given, with_backward=True):
        pass
    assert time.monotonic() - began_s >= 0.05
    assert 0 < speed.predict_bin_s(lengths, 1, with_backward=False) < 0.02
    with padded.emulate(given, with_backward=False):
        time.sleep(0.1)
    assert speed.emulated_steps == 2 and speed.late_steps >= 1


def test_rank_emulates_the_accelerator_of_its_slot(tmp_path: Path) -> None:
    hundred = job(tmp_path, "declared/100")
    fast, slow = (build_emulation(hundred, f"cpu:1 {name}") for name in ("L40S", "T4"))
    assert fast is not None and slow is not None
    assert (fast.costs.name, slow.costs.name) == ("L40S", "T4")
    assert slow.costs.experts.interpolate_s(8) == pytest.approx(
        7 * fast.costs.experts.interpolate_s(8)
    )
    double_length = build_emulation(job(tmp_path, "declared/200"), "cpu:1 T4")
    assert double_length is not None
    assert double_length.predict_bin_s([32], 1) == pytest.approx(2 * slow.predict_bin_s([32], 1))
    longer = build_emulation(job(tmp_path, "declared/100/4"), "cpu:1 T4")
    assert longer is not None
    assert longer.predict_bin_s([32], 1) == pytest.approx(slow.predict_bin_s([128], 1))
    assert build_emulation(job(tmp_path, ""), "cpu:1") is None
    for unknown in ("cpu:1", "cuda:0 Something", ""):
        with pytest.raises(ConfigError, match="MESHRL_EMULATED_ACCELERATORS"):
            build_emulation(hundred, unknown)


def job(directory: Path, speed: str) -> JobData:
    make_tokenizer(directory)
    document: dict[str, Any] = {
        "name": "it",
        "model": {"config": QWEN},
        "training": {"ranks": 2, "emulate": speed},
    }
    return JobData("it", JobConfig.from_document(document), directory, directory)


SPEED = EmulatedTrainingSpeed(tokens_per_s=100.0, update_s=2.0)


def local(
    clock: VirtualClock, random: Random, speed: EmulatedTrainingSpeed | None = None
) -> GangCompute:
    mesh = alone("trainer/j", clock, random, SimulatedHost(clock, random.child("host")))
    return GangCompute(
        mesh, "j", Rank.for_single_rank(fresh_learner("plain")), PieceRunner(mesh, emulation=speed)
    )


@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_emulated_step_takes_the_declared_time_with_equal_weights(
    clock: VirtualClock, random: Random
) -> None:
    plain, create_emulator = local(clock, random), local(clock, random, SPEED)
    bins = bins_of_step(0)
    weights = []
    for compute in (plain, create_emulator):
        began = clock.monotonic()
        await compute.begin_step()
        for index, bin in enumerate(bins):
            await compute.compute_round(index, [bin])
        await compute.apply_gradient(BINS, 1.0, 1.0)
        measured_s = clock.monotonic() - began
        learner = compute.local_learner
        assert learner is not None
        weights.append(learner.copy_weights())
    tokens = sum(len(bin.tokens) for bin in bins)
    assert measured_s == pytest.approx(tokens / 100.0 + 2.0, abs=1e-6)
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
    assert create_emulator.late_counts == {"emulated_count": BINS + 1, "late_count": 0}
    began = clock.monotonic()
    await create_emulator.score(bins, "logprobs")
    assert clock.monotonic() - began == pytest.approx(tokens / 300.0, abs=1e-6)


@story_on(run_virtual, given=2)
async def test_overloaded_piece_counts_as_late(clock: Clock, random: Random) -> None:
    padding = EmulationTimer(clock)
    for lasts_s in (0.2, 1.05, 1.2):
        await padding.run_padded(1.0, partial(clock.sleep, lasts_s))
    assert padding.late_counts == {"emulated_count": 3, "late_count": 1}


def test_training_speed_is_a_profile_or_two_numbers() -> None:
    assert parse_training_speed("4000/150") == EmulatedTrainingSpeed(4000.0, 0.15)
    fast, slow = TRAINING_PROFILES["h100-7b"], TRAINING_PROFILES["a100-7b"]
    assert 1e3 < slow.tokens_per_s < fast.tokens_per_s < 1e5
    for text in ("tpu", "4000", "0/10", "nan/10", "4000/-1", "4000/inf"):
        with pytest.raises(ConfigError, match="there is no emulated"):
            parse_training_speed(text)


CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
}


class CpuClock(SystemClock):
    """CPU time of this thread, which other processes do not lengthen."""

    def monotonic(self) -> float:
        return time.thread_time()


@pytest.mark.deep
def test_profile_is_of_one_layer_for_any_depth() -> None:
    found = measure_profile(ModelConfig.from_hf(WIDE), CPU, torch.float32, 1024, CpuClock(), "here")
    kind = found.costs
    assert kind.name == "here" and kind.memory_bytes > 1e6 and found.backward_factor > 0
    assert kind.attention is not None and kind.head is not None
    assert kind.attention.at == (128, 256, 512, 1024) == kind.head.at
    assert kind.experts.at[0] == 16 and kind.experts.at[-1] == 4096
    assert kind.experts.interpolate_s(4096) > kind.experts.interpolate_s(16) > 0
    assert kind.attention.interpolate_s(1024) > kind.attention.interpolate_s(128)
    assert parse_accelerator_costs(json.loads(json.dumps(found.encode()))["kind"], "it") == kind


@pytest.mark.parametrize("model", [QWEN, MIXTRAL, SHARED])
def test_each_architecture_is_profiled(model: dict[str, Any]) -> None:
    shape = ModelConfig.from_hf(model)
    found = measure_profile(shape, CPU, torch.float32, 64, CpuClock())
    assert found.costs.attention is not None and found.costs.attention.at == (64,)


def test_slow_measurement_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_profile, "BUDGET_S", 0.0)
    found = measure_profile(ModelConfig.from_hf(WIDE), CPU, torch.float32, 1024, CpuClock())
    assert found.costs.experts.at == (16,)
    assert found.costs.experts.interpolate_s(32) == pytest.approx(
        2 * found.costs.experts.interpolate_s(16)
    )


def test_profile_depends_on_model_length_and_kind(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)

    def profile_for(name: str = "A40", bins: int = 512, **shape: Any) -> dict[str, Any]:
        document = {
            "name": "mixture",
            "model": {"config": WIDE | shape},
            "training": {"ranks": 2, "bin_tokens": bins, "zebra": {"auto": True}},
        }
        data = JobData("j", JobConfig.from_document(document), tmp_path, tmp_path)
        return accelerator_profile._build_profile_key(data, name)

    assert profile_for() == profile_for()
    assert (
        len(
            {
                json.dumps(one)
                for one in (
                    profile_for(),
                    profile_for("T4"),
                    profile_for(bins=64),
                    profile_for(num_experts=8),
                )
            }
        )
        == 4
    )


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": {"name": 3}, "backward": 1}', "\x00"])
def test_unreadable_profile_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    assert accelerator_profile._read_profile(path) is None
    assert accelerator_profile._read_profile(tmp_path / "none.json") is None
