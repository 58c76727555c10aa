"""Adapters and monitoring in a job file: what would fail later is an error at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.base.errors import ConfigError
from meshrl.job import jobfile

MODEL = (
    "{ model_type = 'llama', vocab_size = 40, hidden_size = 16, num_hidden_layers = 1, "
    "num_attention_heads = 2, num_key_value_heads = 1, intermediate_size = 24 }"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.rank=-1"], r"lora\.rank = -1 must be at least 0"),
        (["lora.rank=4", "lora.targets=['heads']"], r"lora\.targets.*no projection 'heads'"),
        (["lora.rank=9"], "rank 9 for a projection of width 8"),
        (["lora.rank=4", "lora.alpha=0"], r"lora\.alpha = 0.* must be above 0"),
        (["mesh.metrics=everywhere"], r"mesh\.metrics.*no place to listen at.*HOST:LOW-HIGH"),
    ],
)
def test_what_cannot_be_is_told_with_its_place(
    job: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        jobfile.load(job, [f"model.config={MODEL}", *settings])


def test_adapters_are_a_line_of_the_job_file(job: Path) -> None:
    lines = [f"model.config={MODEL}", "lora.rank=8", 'lora.targets=["qkv", "o_proj"]']
    config, _ = jobfile.load(job, [*lines, "mesh.metrics=off"])
    assert (config.lora.rank, config.lora.scale) == (8, 4.0)
    assert config.mesh.metrics == "off"
