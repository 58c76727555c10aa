"""Loaded weights of an engine, the base's version and adapters, and the shapes of new ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.adapter_deltas import MAX_ADAPTERS
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.engine_contract import NO_VERSION
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.layout.version_image import get_meta_tensors


class LoadedWeights:
    """Weights of one engine.

    They get an id at each update, by which `slots` records the weights of each cache.
    """

    def __init__(self, slots: Slots) -> None:
        self.version = NO_VERSION
        self.is_asleep = True
        self.adapter_indices: dict[str, int] = {
            "": 0
        }  # versions of loaded adapters; the base has none
        self.incomplete_adapters: set[int] = set()  # weights with tensors of different versions
        self._slots, self._last_weights_id = slots, 0

    @property
    def is_complete(self) -> bool:
        """True if all tensors are of one version."""
        return self.version != NO_VERSION and not self.incomplete_adapters

    @property
    def is_ready(self) -> bool:
        """True if a complete version is loaded."""
        return not self.is_asleep and self.version != NO_VERSION and not self.incomplete_adapters

    @property
    def adapters(self) -> dict[str, int]:
        """Versions of the loaded adapters, by name."""
        complete = {
            name: at
            for name, at in self.adapter_indices.items()
            if at and at not in self.incomplete_adapters
        }
        return {name: int(self._slots.adapter_versions[at]) for name, at in complete.items()}

    def get_adapter_name(self, adapter_index: int) -> str:
        """Return the name of the adapter at an index; empty: the base alone."""
        return next(name for name, at in self.adapter_indices.items() if at == adapter_index)

    def choose_adapter_index(self, name: str) -> int:
        """Return the index for an adapter to load; raise Refused if none is free."""
        used_indices = self.adapter_indices.values()
        place = self.adapter_indices.get(name) or next(
            (i for i in range(1, MAX_ADAPTERS + 1) if i not in used_indices), 0
        )
        if not name or not place:
            raise Refused(
                f"adapter {name!r} does not fit beside {len(used_indices) - 1} others",
                where="engine",
                fix=f"Unload one: an engine holds at most {MAX_ADAPTERS} named adapters",
            )
        return place

    def set_base_version(self, version: int) -> None:
        """Record new weights, for the base and for the base with each adapter."""
        self.version = self._slots.adapter_versions[0] = version
        for place in self.adapter_indices.values():
            self._assign_weights_id(place)

    def set_adapter_version(self, name: str, adapter_index: int, version: int) -> None:
        """Record a new version of an adapter."""
        self.incomplete_adapters.discard(adapter_index)
        self.adapter_indices[name] = adapter_index
        self._slots.adapter_versions[adapter_index] = version
        self._assign_weights_id(adapter_index)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter."""
        self.incomplete_adapters.discard(self.adapter_indices.pop(name))

    def _assign_weights_id(self, adapter_index: int) -> None:
        self._last_weights_id += 1
        self._slots.weights_ids[adapter_index] = self._last_weights_id


def get_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a model, by name."""
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise Refused unless `state` has exactly the tensors of `shapes`."""
    state = get_meta_tensors(state)
    odd = shapes.keys() ^ state.keys()
    odd |= {name for name in shapes.keys() - odd if shapes[name] != tuple(state[name].shape)}
    if odd:
        raise Refused(
            f"the weights do not match the model: {min(odd)} is missing, unknown or of another "
            "shape",
            where="engine",
            fix="Publish all tensors of the model that the engine was started with",
        )
