"""Sequences end to end have the logits and the gradients that they have alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.ops.varlen import VarlenAttention
from tests.attention import causal_attention
from tests.load import scaled

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
        "from tests.unit.common.model.test_attention import training_pass\n"
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
