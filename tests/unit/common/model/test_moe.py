"""A mixture of experts: its balance, its gradients, and routing that is given."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from meshrl.common.base.experts import UNKNOWN
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder, SparseLayer
from meshrl.common.model.network.moe import Experts, Routing, balance
from tests.attention import causal_attention

MOE = ModelConfig(
    architecture="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_size=48,
    qk_norm=True,
    experts=6,
    experts_per_token=2,
    expert_ffn_size=16,
    normalise_routing=True,
    balance_coefficient=0.01,
    dense_layers=(1,),
    max_positions=64,
)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """The same numbers, whatever ran before."""
    torch.manual_seed(0)


def built(config: ModelConfig = MOE, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    decoder = Decoder(config, dtype)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def experts_of(decoder: Decoder, layer: int = 0) -> Experts:
    return cast(SparseLayer, decoder.layers[layer]).experts


def tokens_of(n: int, seed: int = 1) -> torch.Tensor:
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


def plainly(block: Experts, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Token by token, choice by choice."""
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
def test_outputs_and_gradients_are_those_of_each_token_by_itself(
    dtype: torch.dtype, width: int, normalise: bool
) -> None:
    config = replace(MOE, normalise_routing=normalise, expert_ffn_size=width)
    block = experts_of(built(config, dtype))
    x = torch.randn(40, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 32, dtype=dtype)
    y, routed = block(x)
    parameters = [x, *block.parameters()]
    ours = torch.autograd.grad((y * weight).sum(), parameters)
    expected = plainly(block, x, routed.experts)
    theirs = torch.autograd.grad((expected * weight).sum(), parameters)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)  # the router is float32
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_experts_without_tokens_have_no_gradient_and_do_no_harm() -> None:
    block = experts_of(built())
    y, routed = block(torch.randn(1, 32))
    y.sum().backward()
    busy = set(routed.experts.flatten().tolist())
    idle = [e for e in range(6) if e not in busy]
    gradient = block.gate_up.grad
    assert gradient is not None and len(idle) == 4 and gradient[idle].abs().max() == 0
    assert gradient[list(busy)].abs().max() > 0


def test_a_router_sends_tokens_to_its_likeliest_experts() -> None:
    block = experts_of(built())
    x = torch.randn(50, 32)
    _, routed = block(x)
    expected = (x @ block.router.T).topk(2).indices
    assert torch.equal(routed.experts.sort().values, expected.sort().values)


def test_routing_that_is_given_is_taken_and_told() -> None:
    decoder, tokens = built(), tokens_of(20)
    given = torch.randint(6, (1, 20, 2, 1), dtype=torch.int16)
    given = torch.cat((given, (given + 1) % 6), -1)
    given[0, 3] = UNKNOWN
    free, first = run(decoder, tokens)
    bound, second = run(decoder, tokens, given)
    known = torch.arange(20) != 3
    assert first.experts is not None and second.experts is not None
    assert torch.equal(second.experts[0, known], given[0, known].long())
    assert (second.experts[0, 3] >= 0).all()
    assert not torch.allclose(free, bound, atol=1e-3)
    again, third = run(decoder, tokens, first.experts)
    assert third.experts is not None
    assert torch.equal(first.experts, third.experts)
    torch.testing.assert_close(again, free)


def test_nothing_given_is_the_routers_own_way() -> None:
    decoder, tokens = built(), tokens_of(20)
    free, _ = run(decoder, tokens)
    unknown, _ = run(decoder, tokens, torch.full((1, 20, 2, 2), UNKNOWN))
    assert torch.equal(free, unknown)


def test_a_router_learns_from_tokens_whose_experts_are_given() -> None:
    decoder, tokens = built(), tokens_of(20)
    given = torch.tensor([0, 3]).expand(1, 20, 2, 2)
    hidden, _ = run(decoder, tokens, given)
    decoder.logits(hidden).square().sum().backward()
    gradient = experts_of(decoder).router.grad
    assert gradient is not None
    assert gradient[[0, 3]].abs().min() > 1e-4 and gradient[[1, 2, 4, 5]].abs().max() < 1e-6


@pytest.mark.group("transformers")  # which one worker imports for all
@pytest.mark.parametrize("counted", [None, [True] * 30 + [False] * 20])
def test_the_balance_is_that_of_transformers_times_the_tokens(counted: list[bool] | None) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    block = experts_of(built())
    x = torch.randn(50, 32)
    logits = x @ block.router.T
    _, routed = block(x)
    mask = torch.tensor(counted or [True] * 50)
    theirs = load_balancing_loss_func((logits,), 6, 2, mask[None].long())
    ours = balance(logits.softmax(-1), routed.experts, mask)
    torch.testing.assert_close(ours, theirs * mask.sum())


def test_the_balance_of_a_pass_is_its_layers_mean_by_the_coefficient() -> None:
    decoder, tokens = built(), tokens_of(30)
    mask = torch.arange(30)[None] >= 10
    _, routing = run(decoder, tokens, counted=mask)
    assert routing.balance is not None and routing.experts is not None
    losses = []
    for index, layer in ((0, 0), (2, 1)):
        x = seen_by(decoder, tokens, index)
        probabilities = (x @ experts_of(decoder, index).router.T).softmax(-1)[0]
        losses.append(balance(probabilities, routing.experts[0, :, layer], mask[0]))
    torch.testing.assert_close(routing.balance, 0.01 * (losses[0] + losses[1]) / 2)
    routing.balance.backward()
    gradient = experts_of(decoder).router.grad
    assert gradient is not None and gradient.abs().max() > 0
    _, uncounted = run(decoder, tokens)
    assert uncounted.balance is not None and uncounted.balance.item() == 0


def seen_by(decoder: Decoder, tokens: torch.Tensor, index: int) -> torch.Tensor:
    """What a layer's router is given."""
    seen: list[torch.Tensor] = []
    hook = experts_of(decoder, index).register_forward_pre_hook(
        lambda module, given: seen.append(given[0])
    )
    run(decoder, tokens)
    hook.remove()
    return seen[0]


def test_perfect_balance_is_k_a_token() -> None:
    even = torch.full((12, 6), 1 / 6)
    chosen = torch.tensor([[i % 6, (i + 3) % 6] for i in range(12)])
    everywhere = torch.ones(12, dtype=torch.bool)
    assert balance(even, chosen, everywhere).item() == pytest.approx(2 * 12)
    skewed = torch.tensor([0.5, 0.3, 0.05, 0.05, 0.05, 0.05]).expand(12, 6)
    worse = balance(skewed, torch.tensor([[0, 1]] * 12), everywhere)
    assert worse.item() > 2 * 2 * 12


def test_a_dense_decoder_has_no_routing() -> None:
    dense = replace(MOE, experts=0, experts_per_token=0, dense_layers=(), architecture="qwen3")
    _, routing = run(built(dense), tokens_of(5), counted=torch.ones(1, 5, dtype=torch.bool))
    assert routing.experts is None and routing.balance is None


def test_checkpointed_layers_give_the_same_gradients() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    tokens, mask = tokens_of(24), torch.ones(1, 24, dtype=torch.bool)
    gradients = []
    for checkpointed in (False, True):
        decoder = built()
        if checkpointed:
            apply_activation_checkpointing(
                decoder, check_fn=lambda module: isinstance(module, SparseLayer)
            )
        hidden, routing = run(decoder, tokens, counted=mask)
        assert routing.balance is not None
        (decoder.logits(hidden).square().sum() + routing.balance).backward()
        gradients.append([p.grad for p in decoder.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
