"""Packing sequences into rows changes nothing but where they lie."""

from __future__ import annotations

import subprocess
import sys

import torch

from common.model.attention import causal_attention, packed_attention, segment_positions
from common.model.config import ModelConfig
from common.model.decoder import Decoder

TINY = ModelConfig(
    architecture="llama",
    vocab_size=31,
    hidden_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_size=40,
    tie_embeddings=True,
    max_positions=64,
)


def tiny_decoder(seed: int = 0) -> Decoder:
    decoder = Decoder(TINY)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def rows_of(lengths: list[list[int]], width: int) -> torch.Tensor:
    """Segment ids of rows that hold segments of these lengths, padded to `width`."""
    rows = [[i for i, n in enumerate(row) for _ in range(n)] for row in lengths]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def test_positions_start_anew_in_each_segment() -> None:
    segments = rows_of([[3, 2], [4]], 6)
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]


def test_a_packed_sequence_has_the_logits_it_has_alone() -> None:
    decoder = tiny_decoder()
    segments = rows_of([[5, 7, 3], [9, 4]], 16)
    tokens = torch.randint(31, segments.shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        packed = decoder.logits(
            decoder(tokens, segment_positions(segments), packed_attention(segments))
        )
        for row in range(2):
            for segment in range(int(segments[row].max()) + 1):
                where = segments[row] == segment
                alone = tokens[row, where].unsqueeze(0)
                positions = torch.arange(alone.shape[1]).unsqueeze(0)
                logits = decoder.logits(decoder(alone, positions, causal_attention))
                torch.testing.assert_close(packed[row, where], logits[0], atol=1e-5, rtol=0)


def test_rows_of_one_segment_take_the_causal_path_with_the_same_result() -> None:
    decoder = tiny_decoder()
    segments = rows_of([[9], [12]], 12)
    assert packed_attention(segments) is causal_attention
    assert packed_attention(rows_of([[9, 2], [12]], 12)) is not causal_attention
    masked = packed_attention(torch.cat((segments, rows_of([[5, 7]], 12))))
    tokens = torch.randint(31, (3, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(12).expand(3, 12)
    with torch.inference_mode():
        plain = decoder(tokens[:2], positions[:2], causal_attention)
        general = decoder(tokens, positions, masked)[:2]
    real = segments >= 0
    torch.testing.assert_close(plain[real], general[real], atol=1e-5, rtol=0)


def test_padding_in_front_is_not_taken_for_the_causal_case() -> None:
    segments = torch.tensor([[-1, 0, 0, 0]])
    assert packed_attention(segments) is not causal_attention


def test_one_segments_gradient_does_not_depend_on_its_neighbours() -> None:
    segments = rows_of([[6, 8]], 14)
    gradients = []
    for seed in (1, 2):
        decoder = tiny_decoder()
        tokens = torch.randint(31, (1, 14), generator=torch.Generator().manual_seed(seed))
        tokens[:, :6] = torch.arange(6)
        hidden = decoder(tokens, segment_positions(segments), packed_attention(segments))
        decoder.logits(hidden[:, :6]).logsumexp(-1).sum().backward()
        gradients.append(decoder.layers[0].qkv.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


def test_a_training_pass_is_the_same_to_the_last_bit_in_another_process() -> None:
    script = (
        "import torch, xxhash; torch.set_num_threads(1)\n"
        "from tests.unit.model.test_attention import *\n"
        "segments = rows_of([[20, 12], [30]], 32); d = tiny_decoder()\n"
        "t = torch.randint(31, segments.shape, generator=torch.Generator().manual_seed(1))\n"
        "h = d(t, segment_positions(segments), packed_attention(segments))\n"
        "d.logits(h).logsumexp(-1).sum().backward()\n"
        "print(xxhash.xxh3_64_hexdigest(b''.join(\n"
        "    p.grad.numpy().tobytes() for p in d.parameters())))\n"
    )
    command = [sys.executable, "-c", script]
    digests = {
        subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        for _ in range(2)
    }
    assert len(digests) == 1
