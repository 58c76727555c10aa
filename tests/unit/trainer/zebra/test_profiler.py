"""What a rank measures of its accelerator, and keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.base.clock import SystemClock
from meshrl.common.hardware.zebra.profile import kind_of_table
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.trainer.zebra import profiling
from meshrl.services.trainer.zebra.profiling import profiled
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.zebra.cases import MIXTRAL, QWEN, SHARED

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
