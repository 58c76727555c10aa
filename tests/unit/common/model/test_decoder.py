"""Fresh decoders, and sequences end to end that compute as they do alone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.pointwise import Plain
from meshrl.kernels.ops.varlen import VarlenAttention
from tests.attention import causal_attention
from tests.load import scaled

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
TINY = ModelConfig(
    architecture="llama",
    vocab_size=31,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_size=40,
    tie_embeddings=True,
    max_positions=64,
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


def tiny_decoder(seed: int = 0) -> Decoder:
    decoder = Decoder(TINY)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def packed_logits(decoder: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    attention = VarlenAttention(starts, sum(lengths), torch.device("cpu"))
    return decoder.logits(decoder(torch.cat(sequences), positions, attention))


def some_tokens(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (length,), generator=generator) for length in lengths]


def test_a_packed_sequence_has_the_logits_it_has_alone() -> None:
    decoder, sequences = tiny_decoder(), some_tokens(5, 40, 3, 1, 17)
    with torch.inference_mode():
        packed = packed_logits(decoder, sequences).split([len(s) for s in sequences])
        for tokens, logits in zip(sequences, packed, strict=True):
            alone = decoder(tokens[None], torch.arange(len(tokens))[None], causal_attention)
            torch.testing.assert_close(logits, decoder.logits(alone)[0], atol=1e-5, rtol=0)


def test_padding_behind_a_row_does_not_change_it() -> None:
    decoder, (tokens,) = tiny_decoder(), some_tokens(12)
    positions = torch.arange(12)[None]
    with torch.inference_mode():
        whole = decoder(tokens[None], positions, causal_attention)[:, :9]
        short = decoder(tokens[None, :9], positions[:, :9], causal_attention)
    torch.testing.assert_close(whole, short, atol=1e-5, rtol=0)


def test_one_sequences_gradient_does_not_depend_on_its_neighbours() -> None:
    gradients = []
    for seed in (1, 2):
        decoder = tiny_decoder()
        logits = packed_logits(decoder, [torch.arange(6), *some_tokens(8, seed=seed)])
        logits[:6].logsumexp(-1).sum().backward()
        gradients.append(decoder.layers[0].qkv.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


@pytest.mark.rotating(2)
def test_a_training_pass_is_the_same_to_the_last_bit_in_another_process() -> None:
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
    """The digest of its gradients."""
    decoder = tiny_decoder()
    packed_logits(decoder, some_tokens(20, 12, 30)).logsumexp(-1).sum().backward()
    gradients = (p.grad for p in decoder.parameters())
    parts = [g.numpy().tobytes() for g in gradients if g is not None]
    assert len(parts) == len(list(decoder.parameters()))
    return xxhash.xxh3_64_hexdigest(b"".join(parts))
