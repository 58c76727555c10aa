"""Kept gradients: one sum, in the order of rounds, whoever brings which first."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshrl.common.base.errors import Refused
from meshrl.services.trainer.arithmetic.gradient_sum import GradientSum


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1000, generator=generator) * 10.0**i for i in range(count)]


def test_the_sum_is_that_of_the_order_of_rounds_whatever_comes_first() -> None:
    expected = sum(gradients(4)[1:], gradients(4)[0].clone())
    for order in itertools.permutations(range(4)):
        gradient_sum, made = GradientSum(), gradients(4)
        for index in order:
            gradient_sum.keep(index, made[index])
            gradient_sum.keep(index, torch.full((1000,), torch.inf))  # again, and late
        assert torch.equal(gradient_sum.total(4), expected)


def test_a_missing_round_is_refused() -> None:
    gradient_sum = GradientSum()
    gradient_sum.keep(1, torch.ones(3))
    with pytest.raises(Refused, match="0 of 2"):
        gradient_sum.total(2)


def test_threads_add_each_round_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            gradient_sum = GradientSum()
            ones = [(index, torch.ones(2000)) for index in range(16) for _ in range(2)]
            list(
                threads.map(lambda pair, gradient_sum=gradient_sum: gradient_sum.keep(*pair), ones)
            )
            assert torch.equal(gradient_sum.total(16), torch.full((2000,), 16.0))
