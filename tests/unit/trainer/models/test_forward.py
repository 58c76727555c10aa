"""Forward pass over a bin: equal to single sequences for every optimization of time or memory."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.common.base.errors import BadMessage
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.packing import (
    Bin,
    TrainingSequence,
    build_bin,
    find_fresh_tokens,
    make_bins,
)
from meshrl.services.trainer.models.forward import (
    ForwardOutputs,
    enable_activation_checkpointing,
    fuse_pointwise,
    run_forward,
)
from meshrl.services.trainer.models.precision import WorkingCopy
from tests.attention import causal_attention

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    qk_norm=True,
    tie_embeddings=True,
    max_positions=256,
)
TEMPERATURE = 0.7


def decoder(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    model = Decoder(replace(CONFIG, **changes))
    model.initialise(torch.Generator().manual_seed(0))
    fuse_pointwise(model)
    return model.to(dtype)


def sequences(lengths: Iterable[int], seed: int = 0) -> list[TrainingSequence]:
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = random.random(length) < 0.6
        mask[-1] = True
        tokens = random.integers(0, 40, length).astype(np.int32)
        made.append(
            TrainingSequence(tokens, np.zeros(length, np.float32), mask, np.zeros(length, np.int32))
        )
    return made


def slopes(count: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def gradient(model: Decoder) -> torch.Tensor:
    return torch.cat([cast(torch.Tensor, p.grad).double().reshape(-1) for p in model.parameters()])


def one_by_one(made: list[TrainingSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log-probabilities, entropies and the gradient in float64, sequence by sequence."""
    model = decoder(torch.float64)
    logprobs, entropies = [], []
    for one in made:
        tokens = torch.from_numpy(one.tokens).long()
        hidden = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], causal_attention)
        normal = (model.compute_logits(hidden)[0] / TEMPERATURE).log_softmax(-1)
        where = torch.from_numpy(one.loss_mask[1:])
        logprobs.append(normal.gather(1, tokens[1:, None])[:, 0][where])
        entropies.append(-(normal.exp() * normal).sum(-1)[where])
    found = torch.cat(logprobs)
    found.backward(slopes(len(found)))
    return found.detach(), torch.cat(entropies).detach(), gradient(model)


def one_pass(model: Decoder, bin: Bin) -> ForwardOutputs:
    out = run_forward(model, bin, TEMPERATURE)
    out.logprobs.backward(slopes(len(out.loss_positions)).to(out.logprobs.dtype))
    return out


@settings(max_examples=15)
@given(st.lists(st.integers(2, 120), min_size=1, max_size=6))
def test_bin_equals_its_single_sequences(lengths: list[int]) -> None:
    made, model = sequences(lengths), decoder()
    logprobs, entropies, expected = one_by_one(made)
    out = one_pass(model, build_bin(made))
    torch.testing.assert_close(out.logprobs.detach().double(), logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropies, atol=1e-4, rtol=1e-4)
    error = (gradient(model) - expected).norm() / expected.norm()
    assert float(error) < 1e-5


def test_bins_are_bit_reproducible_and_sequences_equal_within_rounding() -> None:
    made = sequences([2, 3, 2, 4, 2, 64, 33])
    bin, model, other = build_bin(made), decoder(), decoder()
    run_forward(other, build_bin(made[:2]))  # earlier computations make no difference
    first, second = one_pass(model, bin), one_pass(other, bin)
    assert torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(gradient(model), gradient(other))
    for j, one in enumerate(made):
        alone = run_forward(model, build_bin([one]), TEMPERATURE).logprobs
        torch.testing.assert_close(
            first.logprobs[first.sequence_ids == j], alone, atol=1e-5, rtol=1e-5
        )


def test_outputs_have_positions_and_sequences() -> None:
    made = sequences([9, 2, 30])
    bin = build_bin(made)
    out = run_forward(decoder(), bin)
    assert out.loss_positions.tolist() == np.flatnonzero(bin.loss_mask).tolist()
    belongs = [j for j, one in enumerate(made) for trained in one.loss_mask[1:] if trained]
    assert out.sequence_ids.tolist() == belongs
    assert out.hidden.shape == (len(belongs), 32) and out.aux_loss is None


def test_padding_changes_no_bit() -> None:
    made = sequences([40, 17])
    bin = build_bin(made)
    padded = build_bin(made)
    for name in (
        "tokens",
        "targets",
        "positions",
        "loss_mask",
        "fresh_mask",
        "behaviour_logprobs",
        "advantages",
    ):
        setattr(padded, name, np.pad(getattr(bin, name), (0, 13)))
    first, second = decoder(), decoder()
    assert torch.equal(one_pass(first, bin).logprobs, one_pass(second, padded).logprobs)
    torch.testing.assert_close(gradient(first), gradient(second), atol=1e-6, rtol=1e-6)


def test_empty_bin_has_a_zero_gradient() -> None:
    model = decoder()
    out = one_pass(model, build_bin([]))
    assert len(out.loss_positions) == 0 and not gradient(model).any()


def count_saved_bytes(model: Decoder, bin: Bin) -> int:
    """Return the bytes that autograd saves between the passes, without parameters."""
    saved_bytes = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run_forward(model, bin)
    assert out.logprobs.requires_grad
    return sum(size for at, size in saved_bytes.items() if at not in parameters)


@pytest.mark.parametrize("config", [{}, {"num_experts": 4, "num_experts_per_token": 2}])
def test_activation_checkpointing_gives_equal_bits_and_saves_memory(config: dict[str, Any]) -> None:
    if config:
        config = {"architecture": "qwen3_moe", "expert_ffn_size": 24, **config}
    bin = build_bin(sequences([100, 60, 33]))
    plain, again = decoder(num_layers=4, **config), decoder(num_layers=4, **config)
    enable_activation_checkpointing(again)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in again.named_parameters()]
    outs = [one_pass(model, bin) for model in (plain, again)]
    assert torch.equal(outs[0].logprobs, outs[1].logprobs)
    assert torch.equal(gradient(plain), gradient(again))
    assert count_saved_bytes(again, bin) < 0.5 * count_saved_bytes(plain, bin)


def narrow(masters: Decoder) -> tuple[WorkingCopy, list[torch.Tensor]]:
    copy = WorkingCopy(masters, torch.bfloat16)
    sums = [torch.zeros_like(p) for p in masters.parameters()]
    copy.set_gradient_sums([*sums])
    return copy, sums


def test_bfloat16_passes_match_float64_and_accumulate_in_float32() -> None:
    made = sequences([100, 60, 33])
    logprobs, entropies, expected = one_by_one(made)
    copy, sums = narrow(decoder())
    out = one_pass(copy.model, build_bin(made))
    assert out.logprobs.dtype == torch.float32 and out.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(out.logprobs.detach().double(), logprobs, atol=0.05, rtol=0)
    torch.testing.assert_close(out.entropy.double(), entropies, atol=0.05, rtol=0)
    found = torch.cat([s.double().reshape(-1) for s in sums])
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert all(p.grad is None for p in copy.model.parameters())


@pytest.mark.deep
def test_small_gradients_accumulate_without_loss() -> None:
    """Check sums of many small gradients. A bfloat16 sum stops growing at 256 times the addend."""
    bin = build_bin(sequences([20]))
    copy, sums = narrow(decoder())
    one_pass(copy.model, bin)
    once = [s.clone() for s in sums]
    for _ in range(299):
        one_pass(copy.model, bin)
    for total, single in zip(sums, once, strict=True):
        torch.testing.assert_close(total, 300 * single, rtol=1e-4, atol=1e-6)


def test_bfloat16_copy_follows_its_masters() -> None:
    masters = decoder()
    copy, _ = narrow(masters)
    with torch.no_grad():
        for p in masters.parameters():
            p.add_(0.25)
    copy.refresh()
    for p, narrowed in zip(masters.parameters(), copy.model.parameters(), strict=True):
        assert torch.equal(narrowed, p.bfloat16())


def sequence(length: int, seed: int = 0, version: int = 0) -> TrainingSequence:
    random = np.random.default_rng(seed)
    return TrainingSequence(
        tokens=random.integers(0, 64, length).astype(np.int32),
        logprobs=random.normal(size=length).astype(np.float32),
        loss_mask=random.random(length) < 0.5,
        versions=np.full(length, version, np.int32),
        advantages=random.normal(size=length).astype(np.float32),
        extras={"reference": random.normal(size=length).astype(np.float32)},
    )


def unpacked(bins: Iterable[Bin]) -> Iterator[dict[str, NDArray[Any]]]:
    """Return the positions of every sequence as tuples of arrays, in no particular order."""
    for bin in bins:
        for start, end in itertools.pairwise(bin.cu_seqlens):
            arrays = bin.to_arrays()
            del arrays["cu_seqlens"]
            yield {name: array[start:end] for name, array in arrays.items()}


@given(st.lists(st.integers(2, 320), min_size=1, max_size=40), st.integers(320, 2560))
def test_every_sequence_is_packed_once_and_whole(lengths: list[int], budget: int) -> None:
    given_ = [sequence(length, seed) for seed, length in enumerate(lengths)]
    bins = make_bins(given_, budget)
    assert all(bin.tokens.size <= budget for bin in bins)
    found = {(*part["tokens"], part["targets"][-1]): part for part in unpacked(bins)}
    assert sum(1 for _ in unpacked(bins)) == len(given_)
    for one in given_:
        part = found[tuple(one.tokens)]
        assert (part["targets"] == one.tokens[1:]).all()
        assert (part["positions"] == np.arange(len(one.tokens) - 1)).all()
        assert (part["loss_mask"] == one.loss_mask[1:]).all()
        assert (part["behaviour_logprobs"] == one.logprobs[1:]).all()
        assert (part["advantages"] == one.advantages[1:]).all()
        assert (part["extra.reference"] == one.extras["reference"][1:]).all()


def test_tokens_are_fresh_after_a_prefix_of_the_trained_version() -> None:
    one = sequence(6)
    one.loss_mask = np.array([False, True, True, False, True, True])
    one.versions = np.array([-1, 3, 3, -1, 2, 3], np.int32)
    assert find_fresh_tokens(one, 3).tolist() == [False, True, True, False, False, False]
    assert not find_fresh_tokens(one, 2).any() and not find_fresh_tokens(one, -1).any()


def test_prompt_of_another_version_leaves_no_token_fresh() -> None:
    one = sequence(4)
    one.loss_mask = np.array([False, False, True, True])
    one.versions = np.array([1, 1, 2, 2], np.int32)
    assert not find_fresh_tokens(one, 2).any()


def test_version_of_an_abandoned_lineage_is_not_fresh() -> None:
    one = sequence(4)
    one.loss_mask = np.array([False, True, True, True])
    one.versions = np.array([-1, 9, 9, 9], np.int32)
    assert find_fresh_tokens(one, 9).sum() == 3
    one.abandoned_above = 8
    assert not find_fresh_tokens(one, 9).any()
    one.versions = np.array([-1, 8, 8, 9], np.int32)
    assert find_fresh_tokens(one, 8).tolist() == [False, True, True, False]


def test_bin_survives_serialization() -> None:
    (bin,) = make_bins([sequence(50), sequence(70)], 2560, version=0)
    arrays = {name: array.copy() for name, array in bin.to_arrays().items()}
    for array in arrays.values():
        array.flags.writeable = False  # as buffers of a frame are
    again = Bin.from_arrays(arrays)
    assert all((array == arrays[name]).all() for name, array in again.to_arrays().items())
    assert again.loss_token_count == bin.loss_token_count and again.tokens.flags.writeable


def test_invalid_bin_arrays_are_rejected() -> None:
    (bin,) = make_bins([sequence(50)], 2560)
    arrays = bin.to_arrays()
    for wrong in (
        {k: v for k, v in arrays.items() if k != "loss_mask"},
        arrays | {"more": arrays["loss_mask"]},
        arrays | {"tokens": arrays["tokens"].astype(np.int64)},
        arrays | {"behaviour_logprobs": arrays["behaviour_logprobs"][:-1]},
        arrays | {"cu_seqlens": arrays["cu_seqlens"][::-1]},
        {name: array[None] for name, array in arrays.items()},
    ):
        with pytest.raises(BadMessage, match="bin"):
            Bin.from_arrays(wrong)


def test_sequence_without_predicted_tokens_is_rejected() -> None:
    with pytest.raises(ValueError, match="fewer than two tokens"):
        make_bins([sequence(1)], 2560)
