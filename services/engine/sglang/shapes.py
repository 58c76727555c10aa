"""Checks the names and shapes of a model's weights before anything is sent to a server."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.model.config import ModelConfig
from common.model.decoder import Decoder

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(config: ModelConfig) -> Shapes:
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
