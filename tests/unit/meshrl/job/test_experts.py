"""Over how many ranks a job file may have experts split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.base.errors import ConfigError
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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["training.zebra.attention=4"], "leaves none for experts"),
        (["training.zebra.attention=2", "training.expert_parallel=2"], "Set one"),
        (["training.zebra.attention=2", "lora.rank=2"], "trains whole weights"),
        (["training.zebra.attention=2", "training.zebra.hosted=[1,2,3,4,5]"], "5 numbers"),
        (["training.zebra.attention=2", "training.zebra.hosted=[4]"], "which has 6"),
        (["training.zebra.attention=1", "training.zebra.hosted=[4]"], "would share 2 experts"),
        (["training.zebra.attention=2", "algorithm.name=ppo"], "trains no critic"),
        (["training.zebra.attention=2", 'training.pace="4000/150"'], "of one kind"),
    ],
)
def test_ranks_with_attention_that_do_not_come_out_are_refused(
    job: Path, settings: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(job, [*RANKS, *model(True), *settings])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (['training.pace="declared/0"'], "no pace"),
        (['training.pace="declared/1/-1"'], "no pace"),
        (['training.pace="declared/1/1/1"'], "no pace"),
        (['training.pace="declared"'], "no pace"),
        (['training.pace="declared/fast"'], "real seconds for each declared one"),
        (['training.pace="declared/300"', "training.ranks=1"], "training.ranks is 1"),
    ],
)
def test_a_pace_of_declared_accelerators_that_ranks_cannot_keep_is_refused(
    job: Path, settings: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(job, [*RANKS, *model(True), *settings])


@pytest.mark.parametrize("key", ["auto=true", "attention=2"])
def test_ranks_of_two_kinds_keep_the_pace_that_is_declared_of_each(job: Path, key: str) -> None:
    settings = [f"training.zebra.{key}", 'training.pace="declared/300"']
    config, _ = load(job, [*RANKS, *model(True), *settings])
    assert config.training.pace == "declared/300"


def test_a_dense_model_keeps_no_pace_of_declared_accelerators(job: Path) -> None:
    with pytest.raises(ConfigError, match="no mixture"):
        load(job, [*RANKS, 'training.pace="declared/300"'])


def test_a_dense_model_has_no_experts_for_ranks_of_their_own(job: Path) -> None:
    with pytest.raises(ConfigError, match="no mixture"):
        load(job, [*RANKS, "training.zebra.attention=2"])


def model(mixture: bool) -> list[str]:
    if not mixture:
        return []
    found = [f"model.config.{key}={json.dumps(value)}" for key, value in MIXTURE.items()]
    return [*found, 'model.config.model_type="qwen3_moe"']
