"""Ranks that hold a model in rows train as one process does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from batches_under_test import ALGORITHM, OPTIMIZER, STEPS, bins_of_step, fresh_model
from safetensors.torch import load_file
from torch import Tensor

from common.host import SystemHost
from services.trainer.learner import Learner, add

HERE = Path(__file__).parent
PROGRAM = HERE / "rank_program.py"


async def run_ranks(ranks: int, directory: Path) -> None:
    host = SystemHost()
    path = os.pathsep.join([str(HERE), str(HERE.parents[2])])
    children = [
        host.spawn(
            [sys.executable, str(PROGRAM), str(i), str(ranks), str(directory), str(directory)],
            name=f"rank{i}",
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            log=directory / f"rank{i}.log",
        )
        for i in range(ranks)
    ]
    try:
        codes = [await child.wait(150.0) for child in children]
    finally:
        for child in children:
            child.kill()
    logs = "\n".join((directory / f"rank{i}.log").read_text()[-2000:] for i in range(ranks))
    assert codes == [0] * ranks, logs


def one_process() -> tuple[Mapping[str, Tensor], list[float], Learner]:
    learner = Learner(fresh_model(), OPTIMIZER, ALGORITHM)
    norms = []
    for step in range(STEPS):
        gradient, _ = add(learner.gradient(bin) for bin in bins_of_step(step))
        norms.append(learner.apply(gradient, 100.0, 1.0))
    return learner.weights(), norms, learner


@pytest.mark.timeout(240)
async def test_ranks_that_hold_a_model_in_rows_make_the_updates_of_one_process(
    tmp_path: Path,
) -> None:
    """Also after its state was moved to new ranks, with rounds that hybrids computed, and with
    rounds that have no bin for some rank.
    """
    ranks = 3
    await run_ranks(ranks, tmp_path)
    found = load_file(tmp_path / "weights.safetensors")
    expected, norms, learner = one_process()
    torch.testing.assert_close(found.pop("norms"), torch.tensor(norms), rtol=1e-5, atol=1e-6)
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-5, msg=name)
    for rank in range(ranks):
        scores = load_file(tmp_path / f"scores{rank}.safetensors")["scores"]
        own = torch.from_numpy(learner.score(bins_of_step(0)[rank]))
        torch.testing.assert_close(scores, own, rtol=0, atol=1e-4)
