"""Over how many ranks a job file may have experts split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from meshrl.job.jobfile import load

MIXTURE = {
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
RANKS = ("training.ranks=4", "mesh.workers=9")


@pytest.mark.parametrize(
    ("parallel", "mixture", "says"),
    [
        (3, True, "does not divide the 4 ranks"),
        (4, True, "does not divide the model's 6 experts"),
        (2, False, "no mixture of experts"),
    ],
)
def test_a_split_that_does_not_come_out_even_is_refused(
    job: Path, parallel: int, mixture: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(job, [*RANKS, *model(mixture), f"training.expert_parallel={parallel}"])


def test_one_that_does_is_taken(job: Path) -> None:
    config, _ = load(job, [*RANKS, *model(True), "training.expert_parallel=2"])
    assert config.training.expert_parallel == 2


def model(mixture: bool) -> list[str]:
    if not mixture:
        return []
    found = [f"model.config.{key}={json.dumps(value)}" for key, value in MIXTURE.items()]
    return [*found, 'model.config.model_type="qwen3_moe"']
