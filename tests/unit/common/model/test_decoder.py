"""Decoders, dense and with experts: logits, gradients, load balance and fixed routing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash

from meshrl.common.base.expert_routing import UNKNOWN_EXPERT
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder, MoeDecoderLayer
from meshrl.common.model.network.moe import MixtureOfExperts, Routing, compute_balance_loss
from meshrl.common.model.network.pointwise import TorchPointwise
from meshrl.kernels.ops.varlen import VarlenAttention
from tests.attention import causal_attention
from tests.load import scaled
from tests.unit.common.generation import engines_under_test as engines

TINY = ModelConfig("llama", 31, 24, 2, 4, 2, 16, 40, tie_embeddings=True, max_positions=64)
QWEN2 = ModelConfig("qwen2", 64, 96, 3, 3, 1, 32, 256, attention_bias=True, max_positions=320)
MOE = replace(engines.MOE, vocab_size=64, expert_ffn_size=16, max_positions=64)


def test_initialisation_depends_only_on_the_generator() -> None:
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        decoder = Decoder(QWEN2)
        decoder.initialise(torch.Generator().manual_seed(5))
        states.append(decoder.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_initialisation_scales_with_fan_in_and_depth() -> None:
    decoder = Decoder(QWEN2)
    decoder.initialise(torch.Generator().manual_seed(5))
    state = decoder.state_dict()
    assert state["embedding"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["layers.0.qkv"].std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert state["layers.2.down"].std().item() == pytest.approx((256 * 6) ** -0.5, rel=0.05)
    assert state["layers.1.qkv_bias"].abs().max() == 0
    assert (state["final_norm"] == 1).all()


def test_demo_model_has_its_documented_size() -> None:
    config = replace(QWEN2, architecture="llama", attention_bias=False, tie_embeddings=True)
    count = sum(p.numel() for p in Decoder(config).parameters())
    assert 0.29e6 < count < 0.31e6


def test_hidden_states_take_any_leading_shape() -> None:
    decoder = Decoder(QWEN2)
    decoder.initialise(torch.Generator().manual_seed(5))
    tokens = torch.arange(12).view(2, 6)
    hidden = decoder(tokens, torch.arange(6).expand(2, 6), causal_attention)
    assert hidden.shape == (2, 6, 96)
    assert decoder.compute_logits(hidden).shape == (2, 6, 64)


def test_position_beyond_the_table_is_an_error() -> None:
    decoder = Decoder(QWEN2, max_positions=8)
    with pytest.raises(IndexError):
        decoder(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[8]]), causal_attention)


class CountingPointwise(TorchPointwise):
    """Pointwise operators that count their calls."""

    def __init__(self) -> None:
        self.call_counts: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("rms_norm", "swiglu", "split_norm_rotate_heads"):
            self.call_counts[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("experts", [0, 4])
def test_all_layers_use_the_given_pointwise_operators(experts: int) -> None:
    config = replace(QWEN2, architecture="qwen3", attention_bias=False)
    if experts:
        config = replace(
            config,
            architecture="qwen3_moe",
            num_experts=experts,
            num_experts_per_token=2,
            expert_ffn_size=32,
        )
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(5))
    counting = CountingPointwise()
    decoder.set_pointwise(counting)
    decoder(torch.arange(6)[None], torch.arange(6)[None], causal_attention)
    assert counting.call_counts["split_norm_rotate_heads"] == config.num_layers
    assert counting.call_counts["swiglu"] >= config.num_layers
    assert counting.call_counts["rms_norm"] == 2 * config.num_layers + 1


def tiny_decoder(seed: int = 0) -> Decoder:
    decoder = Decoder(TINY)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def packed_logits(decoder: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    attention = VarlenAttention(starts, sum(lengths), torch.device("cpu"))
    return decoder.compute_logits(decoder(torch.cat(sequences), positions, attention))


def some_tokens(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (length,), generator=generator) for length in lengths]


def test_packed_sequence_has_the_logits_of_a_single_one() -> None:
    decoder, sequences = tiny_decoder(), some_tokens(5, 40, 3, 1, 17)
    with torch.inference_mode():
        packed = packed_logits(decoder, sequences).split([len(s) for s in sequences])
        for tokens, logits in zip(sequences, packed, strict=True):
            separate = decoder(tokens[None], torch.arange(len(tokens))[None], causal_attention)
            torch.testing.assert_close(
                logits, decoder.compute_logits(separate)[0], atol=1e-5, rtol=0
            )


def test_padding_does_not_change_a_row() -> None:
    decoder, (tokens,) = tiny_decoder(), some_tokens(12)
    positions = torch.arange(12)[None]
    with torch.inference_mode():
        padded = decoder(tokens[None], positions, causal_attention)[:, :9]
        short = decoder(tokens[None, :9], positions[:, :9], causal_attention)
    torch.testing.assert_close(padded, short, atol=1e-5, rtol=0)


def test_gradient_of_a_sequence_does_not_depend_on_its_neighbours() -> None:
    gradients = []
    for seed in (1, 2):
        decoder = tiny_decoder()
        logits = packed_logits(decoder, [torch.arange(6), *some_tokens(8, seed=seed)])
        logits[:6].logsumexp(-1).sum().backward()
        gradients.append(decoder.layers[0].qkv.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


@pytest.mark.rotating(2)
def test_training_pass_is_bit_identical_in_another_process() -> None:
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.unit.common.model.test_decoder import training_pass\n"
        "print(training_pass())\n"
    )
    command = [sys.executable, "-c", script]
    other = subprocess.run(command, check=True, capture_output=True, timeout=scaled(100), text=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert training_pass() == other.stdout.strip()
    finally:
        torch.set_num_threads(threads)


def training_pass() -> str:
    """Run a training pass and return the digest of its gradients."""
    decoder = tiny_decoder()
    packed_logits(decoder, some_tokens(20, 12, 30)).logsumexp(-1).sum().backward()
    gradients = (p.grad for p in decoder.parameters())
    parts = [g.numpy().tobytes() for g in gradients if g is not None]
    assert len(parts) == len(list(decoder.parameters()))
    return xxhash.xxh3_64_hexdigest(b"".join(parts))


@pytest.fixture(autouse=True)
def seed_random() -> None:
    """Seed the global generator, so that each test draws the same numbers."""
    torch.manual_seed(0)


def make_decoder(
    config: ModelConfig = MOE, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Decoder:
    decoder = Decoder(config, dtype)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def get_experts(decoder: Decoder, layer: int = 0) -> MixtureOfExperts:
    return cast(MoeDecoderLayer, decoder.layers[layer]).experts


def random_tokens(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(MOE.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))


def run(
    decoder: Decoder,
    tokens: torch.Tensor,
    experts: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Routing]:
    routing = Routing(counted)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return decoder(tokens, positions, causal_attention, experts, routing), routing


def compute_by_token(
    block: MixtureOfExperts, x: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Compute the mixture token by token and expert by expert."""
    rows = []
    for token, experts in zip(x, chosen, strict=True):
        share = (block.router @ token).softmax(-1)
        total = share[experts].sum() if block.config.normalise_routing else 1.0
        row = torch.zeros_like(token)
        for e in experts.tolist():
            gate, up = (block.gate_up[e] @ token).chunk(2)
            row = row + share[e] / total * (block.down[e] @ (gate * gate.sigmoid() * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "dtype, width",
    [(torch.float64, 16), (torch.float32, 16), (torch.float32, 18)],
    ids=["float64", "grouped", "one by one"],
)
def test_expert_outputs_and_gradients_match_the_computation_by_token(
    dtype: torch.dtype, width: int, normalise: bool
) -> None:
    config = replace(MOE, normalise_routing=normalise, expert_ffn_size=width)
    block = get_experts(make_decoder(config, dtype))
    x = torch.randn(40, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 32, dtype=dtype)
    y, routed = block(x)
    parameters = [x, *block.parameters()]
    gradients = torch.autograd.grad((y * weight).sum(), parameters)
    expected = compute_by_token(block, x, routed.experts)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parameters)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)  # the router is float32
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_experts_without_tokens_have_zero_gradient() -> None:
    block = get_experts(make_decoder())
    y, routed = block(torch.randn(1, 32))
    y.sum().backward()
    busy = set(routed.experts.flatten().tolist())
    idle = [e for e in range(6) if e not in busy]
    gradient = block.gate_up.grad
    assert gradient is not None and len(idle) == 4 and gradient[idle].abs().max() == 0
    assert gradient[list(busy)].abs().max() > 0


def test_router_selects_the_most_likely_experts() -> None:
    block = get_experts(make_decoder())
    x = torch.randn(50, 32)
    _, routed = block(x)
    expected = (x @ block.router.T).topk(2).indices
    assert torch.equal(routed.experts.sort().values, expected.sort().values)


def test_fixed_routing_is_used_and_returned() -> None:
    decoder, tokens = make_decoder(), random_tokens(20)
    fixed_experts = torch.randint(6, (1, 20, 2, 1), dtype=torch.int16)
    fixed_experts = torch.cat((fixed_experts, (fixed_experts + 1) % 6), -1)
    fixed_experts[0, 3] = UNKNOWN_EXPERT
    router_output, first = run(decoder, tokens)
    fixed_output, second = run(decoder, tokens, fixed_experts)
    known = torch.arange(20) != 3
    assert first.experts is not None and second.experts is not None
    assert torch.equal(second.experts[0, known], fixed_experts[0, known].long())
    assert (second.experts[0, 3] >= 0).all()
    assert not torch.allclose(router_output, fixed_output, atol=1e-3)
    repeated, third = run(decoder, tokens, first.experts)
    assert third.experts is not None
    assert torch.equal(first.experts, third.experts)
    torch.testing.assert_close(repeated, router_output)


def test_unknown_experts_are_chosen_by_the_router() -> None:
    decoder, tokens = make_decoder(), random_tokens(20)
    router_output, _ = run(decoder, tokens)
    unknown, _ = run(decoder, tokens, torch.full((1, 20, 2, 2), UNKNOWN_EXPERT))
    assert torch.equal(router_output, unknown)


def test_router_has_gradients_under_fixed_experts() -> None:
    decoder, tokens = make_decoder(), random_tokens(20)
    fixed_experts = torch.tensor([0, 3]).expand(1, 20, 2, 2)
    hidden, _ = run(decoder, tokens, fixed_experts)
    decoder.compute_logits(hidden).square().sum().backward()
    gradient = get_experts(decoder).router.grad
    assert gradient is not None
    assert gradient[[0, 3]].abs().min() > 1e-4 and gradient[[1, 2, 4, 5]].abs().max() < 1e-6


@pytest.mark.group("transformers")  # imported by one worker for all tests of the group
@pytest.mark.parametrize("counted", [None, [True] * 30 + [False] * 20])
def test_balance_loss_is_that_of_transformers_times_the_tokens(counted: list[bool] | None) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    block = get_experts(make_decoder())
    x = torch.randn(50, 32)
    logits = x @ block.router.T
    _, routed = block(x)
    mask = torch.tensor(counted or [True] * 50)
    expected = load_balancing_loss_func((logits,), 6, 2, mask[None].long())
    loss = compute_balance_loss(logits.softmax(-1), routed.experts, mask)
    torch.testing.assert_close(loss, expected * mask.sum())


def test_balance_loss_of_a_pass_is_the_scaled_mean_of_its_layers() -> None:
    decoder, tokens = make_decoder(), random_tokens(30)
    mask = torch.arange(30)[None] >= 10
    _, routing = run(decoder, tokens, counted=mask)
    assert routing.balance_loss is not None and routing.experts is not None
    losses = []
    for index, layer in ((0, 0), (2, 1)):
        x = capture_router_input(decoder, tokens, index)
        probabilities = (x @ get_experts(decoder, index).router.T).softmax(-1)[0]
        losses.append(compute_balance_loss(probabilities, routing.experts[0, :, layer], mask[0]))
    torch.testing.assert_close(routing.balance_loss, 0.01 * (losses[0] + losses[1]) / 2)
    routing.balance_loss.backward()
    gradient = get_experts(decoder).router.grad
    assert gradient is not None and gradient.abs().max() > 0
    _, uncounted = run(decoder, tokens)
    assert uncounted.balance_loss is not None and uncounted.balance_loss.item() == 0


def capture_router_input(decoder: Decoder, tokens: torch.Tensor, index: int) -> torch.Tensor:
    """Return the input of a layer's router."""
    inputs: list[torch.Tensor] = []
    hook = get_experts(decoder, index).register_forward_pre_hook(
        lambda module, arguments: inputs.append(arguments[0])
    )
    run(decoder, tokens)
    hook.remove()
    return inputs[0]


def test_balance_loss_of_uniform_routing_is_k_per_token() -> None:
    even = torch.full((12, 6), 1 / 6)
    chosen = torch.tensor([[i % 6, (i + 3) % 6] for i in range(12)])
    everywhere = torch.ones(12, dtype=torch.bool)
    assert compute_balance_loss(even, chosen, everywhere).item() == pytest.approx(2 * 12)
    skewed = torch.tensor([0.5, 0.3, 0.05, 0.05, 0.05, 0.05]).expand(12, 6)
    worse = compute_balance_loss(skewed, torch.tensor([[0, 1]] * 12), everywhere)
    assert worse.item() > 2 * 2 * 12


def test_dense_decoder_has_no_routing() -> None:
    dense = replace(
        MOE, num_experts=0, num_experts_per_token=0, dense_layers=(), architecture="qwen3"
    )
    _, routing = run(
        make_decoder(dense), random_tokens(5), counted=torch.ones(1, 5, dtype=torch.bool)
    )
    assert routing.experts is None and routing.balance_loss is None


def test_checkpointed_layers_give_the_same_gradients() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    tokens, mask = random_tokens(24), torch.ones(1, 24, dtype=torch.bool)
    gradients = []
    for checkpointed in (False, True):
        decoder = make_decoder()
        if checkpointed:
            apply_activation_checkpointing(
                decoder, check_fn=lambda module: isinstance(module, MoeDecoderLayer)
            )
        hidden, routing = run(decoder, tokens, counted=mask)
        assert routing.balance_loss is not None
        (decoder.compute_logits(hidden).square().sum() + routing.balance_loss).backward()
        gradients.append([p.grad for p in decoder.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)
