"""What tasks and transfers take on a rank that stands for a declared accelerator."""

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
from meshrl.common.hardware.zebra.kinds import declared_profile
from meshrl.common.hardware.zebra.profile import Profile, kind_of_table
from meshrl.common.hardware.zebra.schedule import TaskKind
from meshrl.common.hardware.zebra.together import expert_parallel_s, reduced_s
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.job.pace import TRAINING_PROFILES, TrainingPace, training_profile
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.trainer.compute.piece_runner import Padding, PieceRunner
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.zebra import profiling
from meshrl.services.trainer.zebra.alike import PacedBins
from meshrl.services.trainer.zebra.pace import ZebraPace, pace_of
from meshrl.services.trainer.zebra.profiling import profiled
from meshrl.sim.loop import VirtualClock, run_virtual
from meshrl.sim.zebra.setups import MODELS
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.ranks.batches_under_test import BINS, bins_of_step, fresh_learner
from tests.unit.trainer.zebra.cases import CASES, MIXTRAL, QWEN, SHARED, bins

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


PACE = TrainingPace(tokens_per_s=100.0, update_s=2.0)


def local(clock: VirtualClock, random: Random, pace: TrainingPace | None = None) -> Compute:
    mesh = alone("trainer/j", clock, random, SimulatedHost(clock, random.child("host")))
    return Compute(mesh, "j", Rank.alone(fresh_learner("plain")), PieceRunner(mesh, pace=pace))


@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_a_step_takes_what_the_pace_says_and_makes_the_same_weights(
    clock: VirtualClock, random: Random
) -> None:
    plain, paced = local(clock, random), local(clock, random, PACE)
    bins = bins_of_step(0)
    weights = []
    for compute in (plain, paced):
        began = clock.monotonic()
        await compute.begin()
        for index, bin in enumerate(bins):
            await compute.compute(index, [bin])
        await compute.apply(BINS, 1.0, 1.0)
        took = clock.monotonic() - began
        learner = compute.alone
        assert learner is not None
        weights.append(learner.copied_weights())
    tokens = sum(len(bin.tokens) for bin in bins)
    assert took == pytest.approx(tokens / 100.0 + 2.0, abs=1e-6)
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
    assert paced.late == {"paced": BINS + 1, "late": 0}
    began = clock.monotonic()
    await paced.score(bins, "logprobs")
    assert clock.monotonic() - began == pytest.approx(tokens / 300.0, abs=1e-6)


@story_on(run_virtual, given=2)
async def test_a_piece_that_overloads_the_host_counts_as_late(clock: Clock, random: Random) -> None:
    padding = Padding(clock)
    for lasts_s in (0.2, 1.05, 1.2):
        await padding.take(1.0, partial(clock.sleep, lasts_s))
    assert padding.late == {"paced": 3, "late": 1}


def test_a_pace_of_training_is_a_profile_or_two_numbers() -> None:
    assert training_profile("4000/150") == TrainingPace(4000.0, 0.15)
    fast, slow = TRAINING_PROFILES["h100-7b"], TRAINING_PROFILES["a100-7b"]
    assert 1e3 < slow.tokens_per_s < fast.tokens_per_s < 1e5
    for text in ("tpu", "4000", "0/10", "nan/10", "4000/-1", "4000/inf"):
        with pytest.raises(ConfigError, match="there is no pace"):
            training_profile(text)


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
def test_a_profile_is_of_one_layer_whatever_the_model_has() -> None:
    found = profiled(ModelConfig.from_hf(WIDE), CPU, torch.float32, 1024, CpuClock(), "here")
    kind = found.kind
    assert kind.name == "here" and kind.memory_bytes > 1e6 and found.backward > 0
    assert kind.attention is not None and kind.head is not None
    assert kind.attention.at == (128, 256, 512, 1024) == kind.head.at
    assert kind.experts.at[0] == 16 and kind.experts.at[-1] == 4096
    assert kind.experts.of(4096) > kind.experts.of(16) > 0
    assert kind.attention.of(1024) > kind.attention.of(128)
    assert kind_of_table(json.loads(json.dumps(found.told()))["kind"], "it") == kind


@pytest.mark.parametrize("model", [QWEN, MIXTRAL, SHARED])
def test_each_architecture_is_measured(model: dict[str, Any]) -> None:
    shape = ModelConfig.from_hf(model)
    found = profiled(shape, CPU, torch.float32, 64, CpuClock())
    assert found.kind.attention is not None and found.kind.attention.at == (64,)


def test_what_takes_long_is_measured_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "BUDGET_S", 0.0)
    found = profiled(ModelConfig.from_hf(WIDE), CPU, torch.float32, 1024, CpuClock())
    assert found.kind.experts.at == (16,)
    assert found.kind.experts.of(32) == pytest.approx(2 * found.kind.experts.of(16))


def test_another_model_length_or_kind_is_another_profile(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)

    def of(name: str = "A40", bins: int = 512, **shape: Any) -> dict[str, Any]:
        document = {
            "name": "mixture",
            "model": {"config": WIDE | shape},
            "training": {"ranks": 2, "bin_tokens": bins, "zebra": {"auto": True}},
        }
        data = JobData("j", JobConfig.from_document(document), tmp_path, tmp_path)
        return profiling._about(data, name)

    assert of() == of()
    assert len({json.dumps(one) for one in (of(), of("T4"), of(bins=64), of(num_experts=8))}) == 4


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": {"name": 3}, "backward": 1}', "\x00"])
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    assert profiling._kept(path) is None
    assert profiling._kept(tmp_path / "none.json") is None
