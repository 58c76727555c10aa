"""The weights that an engine has: the base's version, and the adapters beside it; and the
shapes that new ones must have.
"""

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
    """The weights of one engine. They get a number each time that others come, by which `slots`
    tell whose a cache is.
    """

    def __init__(self, slots: Slots) -> None:
        self.version = NO_VERSION
        self.is_asleep = True
        self.adapter_indices: dict[str, int] = {
            "": 0
        }  # of adapters that are loaded; the base has none
        self.incomplete_adapters: set[int] = (
            set()
        )  # of which some tensors are of one version, some of another
        self._slots, self._last_weights_id = slots, 0

    @property
    def is_complete(self) -> bool:
        """Whether there is a whole version."""
        return self.version != NO_VERSION and not self.incomplete_adapters

    @property
    def is_ready(self) -> bool:
        """Whether a whole version is in place."""
        return not self.is_asleep and self.version != NO_VERSION and not self.incomplete_adapters

    @property
    def adapters(self) -> dict[str, int]:
        """The versions of the adapters that are loaded beside the base, by their names."""
        whole = {
            name: at
            for name, at in self.adapter_indices.items()
            if at and at not in self.incomplete_adapters
        }
        return {name: int(self._slots.loaded[at]) for name, at in whole.items()}

    def get_adapter_name(self, adapter_index: int) -> str:
        """The name of the adapter in a place; empty: the base alone."""
        return next(name for name, at in self.adapter_indices.items() if at == adapter_index)

    def choose_adapter_index(self, name: str) -> int:
        """The place of an adapter that is to be loaded. Refused when none is left."""
        taken = self.adapter_indices.values()
        place = self.adapter_indices.get(name) or next(
            (i for i in range(1, MAX_ADAPTERS + 1) if i not in taken), 0
        )
        if not name or not place:
            raise Refused(
                f"adapter {name!r} has no place beside {len(taken) - 1} others",
                where="engine",
                fix=f"an engine takes {MAX_ADAPTERS} with names: unload one",
            )
        return place

    def set_base_version(self, version: int) -> None:
        """Other weights have come, for the base and for what is computed with each adapter."""
        self.version = self._slots.loaded[0] = version
        for place in self.adapter_indices.values():
            self._assign_weights_id(place)

    def set_adapter_version(self, name: str, adapter_index: int, version: int) -> None:
        """Another version of an adapter has come."""
        self.incomplete_adapters.discard(adapter_index)
        self.adapter_indices[name] = adapter_index
        self._slots.loaded[adapter_index] = version
        self._assign_weights_id(adapter_index)

    def remove_adapter(self, name: str) -> None:
        """An adapter is gone."""
        self.incomplete_adapters.discard(self.adapter_indices.pop(name))

    def _assign_weights_id(self, adapter_index: int) -> None:
        self._last_weights_id += 1
        self._slots.weights_ids[adapter_index] = self._last_weights_id


def get_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, by name."""
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refused unless `state` has exactly the tensors of `shapes`."""
    state = get_meta_tensors(state)
    odd = shapes.keys() ^ state.keys()
    odd |= {name for name in shapes.keys() - odd if shapes[name] != tuple(state[name].shape)}
    if odd:
        raise Refused(
            f"the weights do not fit the model: {min(odd)} is missing, unknown or misshapen",
            where="engine",
            fix="publish all tensors of the model that the engine was started with",
        )
