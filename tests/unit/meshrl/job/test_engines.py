"""Degrees of tensor parallelism that a job file may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.state.pool.demand.asking import need_of
from meshrl.job.jobfile import load

PACED = 'rollout.pace="18/32/6000"'
MANY = "mesh.workers=9"
SGLANG = "rollout.engine=sglang"


def refusal(job: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(job, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("rollout.tensor_parallel=[]",), "is empty"),
        (("rollout.tensor_parallel=[1, 3]", PACED), "has 3, which is no power of two"),
        (("rollout.tensor_parallel=[1, 2]",), "the built-in engine computes on one worker"),
        (
            ("rollout.tensor_parallel=[2]", SGLANG, 'rollout.sglang_options=["--tp=2"]'),
            "sglang_options has --tp=2",
        ),
        (("rollout.tensor_parallel=[64]", SGLANG, "mesh.workers=99"), "heads"),
        (("rollout.tensor_parallel=[2]", PACED, "mesh.workers=2"), "2 that roll out"),
        (("rollout.tensor_parallel=[2]", PACED, MANY, "pool.workers.most=2"), "takes 3"),
    ],
)
def test_degrees_that_nothing_computes_with_are_refused(
    job: Path, overrides: tuple[str, ...], says: str
) -> None:
    assert says in refusal(job, *overrides)


def test_degrees_become_what_the_job_asks_of_the_pool(job: Path) -> None:
    config, _ = load(job, ["rollout.tensor_parallel=[4, 2]", PACED, MANY])
    need = need_of(config.document())
    assert (need.degrees, need.floor, need.alternates) == ((2, 4), 3, False)
    config, _ = load(job, ["rollout.tensor_parallel=[1, 2]", PACED, MANY])
    assert need_of(config.document()).alternates
    config, _ = load(job, [])
    assert need_of(config.document()).degrees == (1,)


def test_a_paced_engine_may_stand_for_a_model_with_more_heads(job: Path) -> None:
    load(job, ["rollout.tensor_parallel=[64]", PACED, "mesh.workers=99"])
