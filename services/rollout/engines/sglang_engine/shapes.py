"""The tensors that a model's weights must be, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.errors import Refused
from common.model.config import ModelConfig
from common.model.decoder import Decoder

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(config: ModelConfig) -> Shapes:
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_state(state: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Refused, with a tensor that is odd; nothing has changed then."""
    odd = shapes.keys() ^ state.keys()
    odd |= {name for name in shapes.keys() - odd if shapes[name] != tuple(state[name].shape)}
    if odd:
        raise Refused(
            f"the weights do not fit the model: {min(odd)} is missing, unknown or misshapen",
            where="engine",
            fix="publish all tensors of the model that the engine was started with",
        )
