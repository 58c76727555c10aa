"""Training with a sharded model equals that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from tests.fork_server import run_module
from tests.unit.trainer.ranks.batches_under_test import (
    SHARED,
    STEPS,
    VARIANTS,
    bins_of_step,
    fresh_learner,
    given_weights,
    has_critic,
)

PROGRAM = f"{__package__}.rank_program"
RANKS = 3  # not divided by the bins of a step nor by the rows of most parameters
SHARING = 4


def one_process(variant: str) -> tuple[Learner, list[float]]:
    learner = fresh_learner(variant)
    learner.load_weights(given_weights(variant))
    norms = []
    for step in range(STEPS):
        gradient, _ = sum_gradients(learner.compute_gradient(bin) for bin in bins_of_step(step))
        norms.append(learner.apply_gradient(gradient, 100.0, 1.0))
    return learner, norms


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.timeout(300)
@pytest.mark.rotating(len(VARIANTS))
@pytest.mark.parametrize("variant", VARIANTS)
async def test_sharded_ranks_make_the_updates_of_one_process(tmp_path: Path, variant: str) -> None:
    """Check that sharded ranks make the updates of one process.

    Cases: from weights that they receive, after a move of the state to new ranks, with rounds that
    hybrids computed, with rounds that have no bin for some rank, with a critic, and with adapters.
    """
    await run_ranks(RANKS, tmp_path, variant)
    assert_trained_as_one_process(variant, tmp_path, RANKS)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", SHARED)
async def test_ranks_can_share_experts_that_others_lack(tmp_path: Path, variant: str) -> None:
    await run_ranks(SHARING, tmp_path, variant)
    assert_trained_as_one_process(variant, tmp_path, SHARING)


async def run_ranks(ranks: int, directory: Path, variant: str) -> None:
    words = str(ranks), str(directory), variant
    await run_module(PROGRAM, *words, log=directory / "ranks.log")


def assert_trained_as_one_process(variant: str, directory: Path, ranks: int) -> None:
    learner, norms = one_process(variant)
    weights = load_file(directory / f"{variant}.weights")
    if variant == "narrow":
        torch.testing.assert_close(weights["norms"], torch.tensor(norms), rtol=0.03, atol=0)
        return
    torch.testing.assert_close(weights.pop("norms"), torch.tensor(norms))
    assert_close(weights, learner.get_weights())
    assert_close(load_file(directory / f"{variant}.state"), learner.copy_optimizer_state())
    for rank in range(ranks):
        scores = load_file(directory / f"{variant}{rank}.safetensors")["scores"]
        what = "values" if has_critic(variant) else "logprobs"
        own = torch.from_numpy(learner.score(bins_of_step(0)[rank], what))
        torch.testing.assert_close(scores, own, rtol=0, atol=1e-4)
