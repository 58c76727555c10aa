"""Engines take weights straight from the chunk files of a version, however these were cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.generation.builtin.build import build
from meshrl.common.model.architecture.config import ModelConfig
from tests.unit.common.generation.engines_under_test import MOE, TINY, decoder
from tests.unit.common.weights.test_images import Cut, Files

PROMPT = np.arange(1, 20, dtype=np.int32)


def cuts(state: dict[str, torch.Tensor], most: int) -> list[list[Cut]]:
    """Chunks of so many elements, in the middle of rows and of tensors."""
    chunks: list[list[Cut]] = [[]]
    filled = 0
    for name, tensor in state.items():
        at = 0
        while at < tensor.numel():
            if filled == most:
                chunks.append([])
                filled = 0
            end = min(tensor.numel(), at + most - filled)
            chunks[-1].append((name, at, end))
            filled, at = filled + end - at, end
    return chunks


@pytest.mark.rotating(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, MOE], ids=["dense", "mixture"])
@pytest.mark.parametrize("path", ["native", "eager"])
def test_weights_in_pieces_are_the_weights(
    path: str, config: ModelConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {name: t.to(dtype) for name, t in decoder(3, config).state_dict().items()}
    files = Files(tmp_path, state)
    for chunk in cuts(state, 333):
        files.chunk(*chunk)
    image = files.image()
    engine = build(config, 2, 64, path=path)
    scores: list[Sequence[float]] = []
    for tensors in (state, decoder(4, config).state_dict(), image.tensors):
        engine.wake(tensors, len(scores))
        scores.append(engine.score(PROMPT).tolist())
    assert scores[2] == scores[0] != scores[1]
    assert not image.whole("embedding") and image.joined_bytes == (
        # The native path has kernels for wider heads than these, and fills them up with zeros.
        sum(state[n].nbytes for n in state if n.endswith(("qkv", "output")) and not image.whole(n))
        if path == "native"
        else 0
    )
