"""Optimizers compared with those of PyTorch."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from meshrl.common.job.config import OptimizerConfig
from meshrl.services.trainer.learner import optimizers
from meshrl.services.trainer.learner.optimizers import Optimizer, compute_lr_factor, orthogonalize

CONFIG = OptimizerConfig(muon_lr=0.02, adamw_lr=0.003, weight_decay=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator))

        self.embedding = parameter(16, 8)
        self.norm = parameter(8)
        self.first, self.second = parameter(12, 8), parameter(12, 8)
        self.wide = parameter(8, 24)


def gradients(model: nn.Module, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = sum(p.numel() for p in model.parameters())
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def set_gradients(model: nn.Module, flat: torch.Tensor) -> None:
    """Set the gradients of `model` to slices of the flat gradient."""
    sizes = [p.numel() for p in model.parameters()]
    for parameter, piece in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


def test_vectors_and_embeddings_match_adamw() -> None:
    learner_optimizer, torch_optimizer = Model(), Model()
    optimizer = Optimizer(learner_optimizer, CONFIG)
    adamw = torch.optim.AdamW(
        [torch_optimizer.embedding, torch_optimizer.norm],
        lr=0.003,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for gradient in gradients(learner_optimizer, 6):
        optimizer.step(gradient, 1.0)
        set_gradients(torch_optimizer, gradient)
        adamw.step()
    assert torch.allclose(learner_optimizer.embedding, torch_optimizer.embedding, atol=1e-6)
    assert torch.allclose(learner_optimizer.norm, torch_optimizer.norm, atol=1e-6)


def test_all_parameters_match_adamw_without_muon() -> None:
    learner_optimizer, torch_optimizer = Model(), Model()
    optimizer = Optimizer(learner_optimizer, OptimizerConfig(muon_lr=0.0, adamw_lr=0.003))
    adamw = torch.optim.AdamW(
        torch_optimizer.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0
    )
    for gradient in gradients(learner_optimizer, 6):
        optimizer.step(gradient, 1.0)
        set_gradients(torch_optimizer, gradient)
        adamw.step()
    for one, other in zip(
        learner_optimizer.parameters(), torch_optimizer.parameters(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)


def test_matrices_match_muon() -> None:
    learner_optimizer, torch_optimizer = Model(), Model()
    optimizer = Optimizer(learner_optimizer, CONFIG)
    matrices = [torch_optimizer.first, torch_optimizer.second, torch_optimizer.wide]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    for gradient in gradients(learner_optimizer, 6):
        optimizer.step(gradient, 1.0)
        set_gradients(torch_optimizer, gradient)
        muon.step()
    for name in ("first", "second", "wide"):
        one, other, before = (
            getattr(m, name) for m in (learner_optimizer, torch_optimizer, Model())
        )
        changed_vectors = (other - before).norm()
        assert (one - other).norm() < 0.02 * changed_vectors  # torch iterates in bfloat16


def test_orthogonal_update_has_singular_values_near_one() -> None:
    for shape in ((3, 12, 8), (8, 24), (8, 8)):
        matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
        values = torch.linalg.svdvals(orthogonalize(matrices))
        assert values.min() > 0.3 and values.max() < 1.3


def test_matrices_of_one_shape_do_not_mix() -> None:
    matrices = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(3))
    alone = torch.stack([orthogonalize(matrix) for matrix in matrices])
    assert torch.allclose(orthogonalize(matrices), alone, atol=1e-5)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("at_once", [1, 30, 100])
def test_update_does_not_depend_on_the_piece_size(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that updates do not depend on the piece size.

    At 30, an embedding is in pieces, the last together with the vector, and one matrix at a time.
    At 100, two matrices.
    """
    whole, pieces = Model(), Model()
    optimizer = Optimizer(whole, CONFIG)
    monkeypatch.setattr(optimizers, "MAX_BATCH_NUMBERS", at_once)
    other = Optimizer(pieces, CONFIG)
    for gradient in gradients(whole, 3):
        optimizer.step(gradient, 1.0)
        other.step(gradient, 1.0)
    assert torch.equal(whole.embedding, pieces.embedding) and torch.equal(whole.norm, pieces.norm)
    for name in ("first", "second", "wide"):
        assert torch.allclose(getattr(whole, name), getattr(pieces, name), atol=1e-6)
    state = other.get_state()
    for name, moment in optimizer.get_state().items():
        assert torch.allclose(moment, state[name], atol=1e-6), name


def test_optimizer_resumes_from_its_saved_state() -> None:
    first, second = Model(), Model()
    optimizer = Optimizer(first, CONFIG)
    early, late = gradients(first, 6)[:3], gradients(first, 6)[3:]
    for gradient in early:
        optimizer.step(gradient, 0.5)
    second.load_state_dict(first.state_dict())
    other = Optimizer(second, CONFIG)
    state = optimizer.get_state()
    for name, moment in other.get_state().items():
        moment.copy_(state[name])
    other.update_count = optimizer.update_count
    for gradient in late:
        optimizer.step(gradient, 0.5)
        other.step(gradient, 0.5)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


def test_loaded_state_allocates_no_memory() -> None:
    model = Model()
    optimizer = Optimizer(model, CONFIG)
    moments = {n: t for n, t in optimizer.get_state().items() if n != "adamw.steps"}
    optimizer.step(gradients(model, 1)[0], 1.0)
    after = optimizer.get_state()
    assert moments and all(t.data_ptr() == after[n].data_ptr() for n, t in moments.items())
    assert all(torch.equal(t, after[n]) for n, t in moments.items()), "it shows what is there now"


def test_threads_share_the_moments_that_one_of_them_creates() -> None:
    for _ in range(20):
        optimizer = Optimizer(Model(), CONFIG)
        barrier = Barrier(4)

        def read(optimizer: Optimizer = optimizer, barrier: Barrier = barrier) -> list[int]:
            barrier.wait()
            return [tensor.data_ptr() for tensor in optimizer.get_tensors().values()]

        with ThreadPoolExecutor(4) as threads:
            found = [one.result() for one in [threads.submit(read) for _ in range(4)]]
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("linear", 0.55, 0.1 + 0.9 / 50), ("constant", 1, 1), ("cosine", 0.55, 0.10089)],
)
def test_learning_rate_warms_up_and_decays_to_its_minimum(
    schedule: Any, middle: float, last: float
) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=5, final_lr=0.1)
    factors = [compute_lr_factor(step, 50, config) for step in range(50)]
    assert factors[0] == pytest.approx(0.2) and max(factors) == factors[4]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert (factors[25], factors[-1]) == pytest.approx((middle, last), abs=1e-5)
    assert [compute_lr_factor(step, 50, config) for step in (30, 31)] == factors[30:32]
