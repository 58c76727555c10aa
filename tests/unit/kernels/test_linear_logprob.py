"""Log-probabilities and entropies without logits: equal to those with logits, in float64.

The comparison includes gradients.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrl.kernels.ops.linear_logprob import MIN_CHUNK_IDS, linear_logprob


def problem(
    t: int, vocab: int, d: int, seed: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    targets = torch.randint(vocab, (t,), generator=generator)
    return scale * normal(t, d), normal(vocab, d), targets, normal(t)


def definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    normal = (hidden @ weight.t() / temperature).log_softmax(-1)
    logprobs = normal.gather(1, targets[:, None])[:, 0]
    return logprobs, -(normal.exp() * normal.clamp(min=-1e30)).sum(-1)


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    slope: Tensor,
    dtype: torch.dtype,
    *options: float,
    device: str = "cpu",
) -> list[Tensor]:
    leaves = [x.to(device, dtype).clone().requires_grad_() for x in (hidden, weight)]
    logprobs, entropy = function(*leaves, targets.to(device), *options)
    slopes = [slope.to(logprobs), slope.flip(0).to(logprobs)]
    torch.autograd.backward([logprobs, entropy], slopes)
    results = logprobs, entropy, *(leaf.grad for leaf in leaves)
    return [cast(Tensor, x).detach().double().cpu() for x in results]


def check(
    t: int,
    vocab: int,
    d: int,
    dtype: torch.dtype,
    tolerance: float,
    temperature: float = 1.0,
    at_once: int = 0,
    scale: float = 1.0,
    device: str = "cpu",
) -> None:
    hidden, weight, targets, slope = problem(t, vocab, d, scale=scale)
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    options = temperature, at_once
    results = run(linear_logprob, hidden, weight, targets, slope, dtype, *options, device=device)
    expected = run(definition, hidden, weight, targets, slope, torch.float64, temperature)
    for value, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(value, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("at_once", [0, 1])  # one chunk, or chunks of MIN_CHUNK_IDS ids
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 0.05)],
)
def test_results_match_for_one_chunk_and_many(
    dtype: torch.dtype, tolerance: float, at_once: int
) -> None:
    check(17, 3 * MIN_CHUNK_IDS + 7, 24, dtype, tolerance, temperature=0.7, at_once=at_once)


@settings(max_examples=20)
@given(
    st.integers(1, 6),
    st.integers(MIN_CHUNK_IDS - 1, 2 * MIN_CHUNK_IDS + 1),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.1, 1.0, 30.0]),  # nearly uniform, and nearly certain
)
def test_results_match_for_any_size_temperature_and_entropy(
    t: int, vocab: int, temperature: float, scale: float
) -> None:
    check(t, vocab, 8, torch.float64, 1e-9, temperature, at_once=1, scale=scale)


@pytest.mark.parametrize("at_once", [0, 1])
def test_absent_ids_have_no_probability_and_no_gradient(at_once: int) -> None:
    """Check with a first range that fills a whole chunk and a last one that ends the vocabulary."""
    vocab, absent = (
        3 * MIN_CHUNK_IDS + 7,
        ((0, MIN_CHUNK_IDS), (MIN_CHUNK_IDS + 3, MIN_CHUNK_IDS + 5), (-9, 0)),
    )
    ranges = [(a % vocab, b % vocab or vocab) for a, b in absent]
    lost = torch.zeros(vocab, dtype=torch.bool)
    for first, end in ranges:
        lost[first:end] = True
    hidden, weight, targets, slope = problem(17, vocab, 24)
    targets = (~lost).nonzero()[targets % int((~lost).sum()), 0]

    def compute_expected(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        normal = (hidden @ weight.t()).masked_fill(lost, -torch.inf).log_softmax(-1)
        entropy = -torch.where(lost, 0, normal.exp() * normal.masked_fill(lost, 0)).sum(-1)
        return normal.gather(1, targets[:, None])[:, 0], entropy

    def compute_result(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob(hidden, weight, targets, 1.0, at_once, ranges)

    about = hidden, weight, targets, slope, torch.float64
    for value, reference in zip(
        run(compute_result, *about), run(compute_expected, *about), strict=True
    ):
        torch.testing.assert_close(value, reference, atol=1e-11, rtol=1e-11)
    assert not run(compute_result, *about)[3][lost].any()


def test_large_logits_do_not_overflow() -> None:
    check(5, 2 * MIN_CHUNK_IDS, 8, torch.float32, 1e-2, at_once=1, scale=100.0)


@pytest.mark.parametrize("vocab", [4, 2 * MIN_CHUNK_IDS])
def test_impossible_tokens_add_nothing_to_the_entropy(vocab: int) -> None:
    weight = torch.full((vocab, 1), -1e300, dtype=torch.float64)
    weight[1] = weight[3] = 0.0
    hidden = torch.ones(1, 1, dtype=torch.float64)
    logprobs, entropy = linear_logprob(hidden, weight, torch.tensor([1]), 1.0, 1)
    half = torch.tensor([0.5], dtype=torch.float64)
    torch.testing.assert_close(logprobs, half.log())
    torch.testing.assert_close(entropy, -half.log())


def test_memory_never_contains_the_logits_of_all_ids() -> None:
    """Check that the largest tensor has the size of a chunk, for any vocabulary."""
    t, vocab = 64, 20 * MIN_CHUNK_IDS
    hidden, weight, targets, slope = problem(t, vocab, 8)
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    with torch.profiler.profile(profile_memory=True) as seen:
        linear_logprob(hidden, weight, targets, 1.0, t * MIN_CHUNK_IDS)[0].backward(slope.float())
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert 0 < largest < t * vocab * 4 / 4


def test_gradients_are_computed_only_where_required() -> None:
    hidden, weight, targets, slope = problem(5, 2 * MIN_CHUNK_IDS, 8)
    for at_once in (0, 1):
        leaf = hidden.clone().requires_grad_()
        linear_logprob(leaf, weight, targets, 1.0, at_once)[0].backward(slope)
        assert leaf.grad is not None and weight.grad is None


@pytest.mark.parametrize("vocab", [9, MIN_CHUNK_IDS + 5])
def test_gradients_match_numeric_ones(vocab: int) -> None:
    hidden, weight, targets, _ = problem(2, vocab, 3)
    row = weight[4].clone().requires_grad_()

    def both(hidden: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        changed = torch.cat([weight[:4], row[None], weight[5:]])
        return linear_logprob(hidden, changed, targets, 0.7, 1)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), row))


@pytest.mark.parametrize("at_once", [0, 1])
@pytest.mark.parametrize("target", [-1, MIN_CHUNK_IDS + 1])
def test_target_out_of_range_is_rejected(at_once: int, target: int) -> None:
    hidden, weight, targets, _ = problem(3, MIN_CHUNK_IDS + 1, 8)
    targets[1] = target
    with pytest.raises(IndexError, match="a target is out of range"):
        linear_logprob(hidden, weight, targets, 1.0, at_once)


@pytest.mark.parametrize("at_once", [0, 1])
def test_empty_input_returns_empty_results(at_once: int) -> None:
    hidden, weight, targets, _ = problem(0, MIN_CHUNK_IDS + 1, 8)
    logprobs, entropy = linear_logprob(hidden, weight, targets, 1.0, at_once)
    assert logprobs.shape == entropy.shape == (0,)
