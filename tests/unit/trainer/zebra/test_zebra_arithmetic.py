"""Arithmetic of a gang whose ranks have attention or experts, compared with one process."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.sharding.row_operations import list_owned_ranges
from meshrl.services.trainer.zebra.zebra_ownership import ZebraOwnership
from tests.fork_server import run_module
from tests.unit.trainer.zebra.cases import CASES, Case, bins, one_process

PROGRAM = f"{__package__}.zebra_program"
RANKS, ROUNDS = 4, 2
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # of gradients, relative to the largest


@pytest.mark.timeout(300)
@pytest.mark.rotating(len(CASES))
@pytest.mark.parametrize("name", CASES)
async def test_ranks_of_two_kinds_match_one_process(tmp_path: Path, name: str) -> None:
    """Compare losses, gradients, scores and updated weights with those of one process.

    Cases: experts on attention ranks or not, recorded routing, recomputed layers, and dense layers
    in between. Repeated rounds are equal to the last bit. Both ranks of a pair launch the transfers
    of both lanes in one order, although one lane of each is slow: NCCL may deadlock otherwise.
    """
    await run_module(PROGRAM, str(tmp_path), name, log=tmp_path / "ranks.log")
    files = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(RANKS)]
    assert_as_one_process(name, CASES[name], files)
    assert_one_launch_order(files)


def assert_one_launch_order(files: list[dict[str, Tensor]]) -> None:
    launched = 0
    for one, other in combinations(range(RANKS), 2):
        here, there = files[one][f"launches.{other}"], files[other][f"launches.{one}"]
        assert torch.equal(here, there), (one, other)
        launched += len(here)
    assert launched


def assert_as_one_process(name: str, case: Case, files: list[dict[str, Tensor]]) -> None:
    learner, near = one_process(case), NEAR[case.dtype]
    shapes = {n: p.shape for n, p in learner.model.named_parameters()}
    config, shape = case.config, case.shape
    mixture = tuple(config.sparse_layers)
    owners = ZebraOwnership(
        shape.attention_ranks, shape.expert_ranks, mixture, config.num_experts, shape.hosted_experts
    )

    def assert_gradient(key: str, whole: Tensor) -> None:
        for rank, found in enumerate(files):
            own = slice_rows(whole, list_owned_ranges(shapes, owners, rank))
            far = (found[key] - own).abs().max() if len(own) else torch.zeros(())
            assert far <= near * whole.abs().max(), (name, key, rank, float(far))

    total = None
    for number in range(ROUNDS):
        gradient, losses = gradients(learner, case, number)
        found = torch.cat([file[f"loss.{number}"] for file in files[: shape.attention_ranks]])
        torch.testing.assert_close(
            found, losses, rtol=1e-6 if near < 1e-3 else 0.05, atol=1e-6, msg=name
        )
        assert_gradient(f"gradient.{number}", gradient)
        total = gradient if total is None else total + gradient
    for rank in range(shape.attention_ranks):
        own = torch.from_numpy(learner.score(bins(case, 0)[rank * shape.micro_batches]))
        torch.testing.assert_close(files[rank]["scores"], own, rtol=0, atol=max(1e-5, near))
    if case.dtype != torch.float32:
        return
    assert total is not None
    norm = learner.apply_gradient(total, 50.0, 1.0)
    for rank, file in enumerate(files):
        assert float(file["norm"]) == pytest.approx(norm, rel=1e-5)
        for weight, tensor in learner.get_weights().items():
            own = tensor[owners.get_rows(weight, len(tensor), rank)]
            torch.testing.assert_close(file[f"weights.{weight}"], own, rtol=1e-4, atol=1e-5)
    gradient, _ = gradients(learner, case, 0)
    for rank, file in enumerate(files):
        own = slice_rows(gradient, list_owned_ranges(shapes, owners, rank))
        far = np.abs((file["gradient.after"] - own).numpy()).max(initial=0.0)
        assert far <= 1e-3 * gradient.abs().max(), (name, rank)


def slice_rows(full: Tensor, ranges: NDArray[np.int64]) -> Tensor:
    return torch.cat([full[start:end] for start, end in ranges.tolist()])


def gradients(learner: Learner, case: Case, number: int) -> tuple[Tensor, Tensor]:
    """Return the sum over the bins of a round, and their losses."""
    total, losses = None, []
    for bin in bins(case, number):
        gradient, stats = learner.compute_gradient(bin)
        losses.append(stats.loss_sum)
        total = gradient if total is None else total + gradient
    assert total is not None
    return total, torch.tensor(losses)
