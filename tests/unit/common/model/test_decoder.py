"""What a fresh decoder looks like."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.pointwise import Plain
from tests.attention import causal_attention

QWEN2 = ModelConfig(
    architecture="qwen2",
    vocab_size=64,
    hidden_size=96,
    layers=3,
    heads=3,
    kv_heads=1,
    head_dim=32,
    ffn_size=256,
    attention_bias=True,
    max_positions=320,
)


def test_initialisation_follows_the_generator_alone() -> None:
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


def test_the_demo_model_has_its_measured_size() -> None:
    config = replace(QWEN2, architecture="llama", attention_bias=False, tie_embeddings=True)
    count = sum(p.numel() for p in Decoder(config).parameters())
    assert 0.29e6 < count < 0.31e6


def test_hidden_states_take_any_leading_shape() -> None:
    decoder = Decoder(QWEN2)
    decoder.initialise(torch.Generator().manual_seed(5))
    tokens = torch.arange(12).view(2, 6)
    hidden = decoder(tokens, torch.arange(6).expand(2, 6), causal_attention)
    assert hidden.shape == (2, 6, 96)
    assert decoder.logits(hidden).shape == (2, 6, 64)


def test_a_position_past_the_table_is_an_error() -> None:
    decoder = Decoder(QWEN2, max_positions=8)
    with pytest.raises(IndexError):
        decoder(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[8]]), causal_attention)


class Counting(Plain):
    """Notes which operators were asked for."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("normed", "swiglu", "heads"):
            self.asked[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("experts", [0, 4])
def test_all_parts_compute_with_the_operators_they_are_given(experts: int) -> None:
    config = replace(QWEN2, architecture="qwen3", attention_bias=False)
    if experts:
        config = replace(
            config,
            architecture="qwen3_moe",
            experts=experts,
            experts_per_token=2,
            expert_ffn_size=32,
        )
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(5))
    counting = Counting()
    decoder.use(counting)
    decoder(torch.arange(6)[None], torch.arange(6)[None], causal_attention)
    assert counting.asked["heads"] == config.layers
    assert counting.asked["swiglu"] >= config.layers
    assert counting.asked["normed"] == 2 * config.layers + 1
