"""The weights that an engine has: the base's version, and the adapters beside it; and the
shapes that new ones must have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.adapters import MOST_ADAPTERS
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.contract import NO_VERSION
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.layout.images import outline


class LoadedWeights:
    """The weights of one engine. They get a number each time that others come, by which `slots`
    tell whose a cache is.
    """

    def __init__(self, slots: Slots) -> None:
        self.version = NO_VERSION
        self.asleep = True
        self.places: dict[str, int] = {"": 0}  # of adapters that are loaded; the base has none
        self.broken: set[int] = set()  # of which some tensors are of one version, some of another
        self._slots, self._numbered = slots, 0

    @property
    def whole(self) -> bool:
        """Whether there is a whole version."""
        return self.version != NO_VERSION and not self.broken

    @property
    def able(self) -> bool:
        """Whether a whole version is in place."""
        return not self.asleep and self.version != NO_VERSION and not self.broken

    @property
    def adapters(self) -> dict[str, int]:
        """The versions of the adapters that are loaded beside the base, by their names."""
        whole = {name: at for name, at in self.places.items() if at and at not in self.broken}
        return {name: int(self._slots.loaded[at]) for name, at in whole.items()}

    def name(self, place: int) -> str:
        """The name of the adapter in a place; empty: the base alone."""
        return next(name for name, at in self.places.items() if at == place)

    def place_for(self, name: str) -> int:
        """The place of an adapter that is to be loaded. Refused when none is left."""
        taken = self.places.values()
        place = self.places.get(name) or next(
            (i for i in range(1, MOST_ADAPTERS + 1) if i not in taken), 0
        )
        if not name or not place:
            raise Refused(
                f"adapter {name!r} has no place beside {len(taken) - 1} others",
                where="engine",
                fix=f"an engine takes {MOST_ADAPTERS} with names: unload one",
            )
        return place

    def loaded_base(self, version: int) -> None:
        """Other weights have come, for the base and for what is computed with each adapter."""
        self.version = self._slots.loaded[0] = version
        for place in self.places.values():
            self._number(place)

    def loaded_adapter(self, name: str, place: int, version: int) -> None:
        """Another version of an adapter has come."""
        self.broken.discard(place)
        self.places[name] = place
        self._slots.loaded[place] = version
        self._number(place)

    def unloaded(self, name: str) -> None:
        """An adapter is gone."""
        self.broken.discard(self.places.pop(name))

    def _number(self, place: int) -> None:
        self._numbered += 1
        self._slots.numbers[place] = self._numbered


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
