"""Checks that new weights have the shapes of the model that an engine was started with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.base.errors import Refused
from common.model.architecture.config import ModelConfig
from common.model.network.decoder import Decoder
from common.weights.layout.images import outline


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, by name."""
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refused unless `state` has exactly the tensors of `shapes`."""
    state = outline(state)
    odd = shapes.keys() ^ state.keys()
    odd |= {name for name in shapes.keys() - odd if shapes[name] != tuple(state[name].shape)}
    if odd:
        raise Refused(
            f"the weights do not fit the model: {min(odd)} is missing, unknown or misshapen",
            where="engine",
            fix="publish all tensors of the model that the engine was started with",
        )
