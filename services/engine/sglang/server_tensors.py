"""Tensors of a version for an SGLang server, converted layer by layer while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from meshrl.common.generation.sglang_model import trim_vocabulary_rows
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import group_by_layer, state_to_hf
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.common.weights.layout.version_image import get_meta_tensors


class ServerTensors(Mapping[str, Tensor]):
    """Tensors by Hugging Face names, of which those of one layer are in memory at a time.

    Tensors of a version that several ranks staged are copies, and all of them would be a second
    model in memory. Iterate in order: another layer replaces the current one.
    """

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
        self._config, self._state = config, state
        meta = get_meta_tensors(state)
        self.meta_tensors: dict[str, Tensor] = {}  # only dtypes and shapes may be used
        self._layer_of_name: dict[str, tuple[str, ...]] = {}
        for names in group_by_layer(meta):
            theirs = self._convert({name: meta[name] for name in names})
            self.meta_tensors |= theirs
            self._layer_of_name |= dict.fromkeys(theirs, tuple(names))
        self._layer: tuple[str, ...] = ()
        self._tensors: dict[str, Tensor] = {}  # of the current layer

    @property
    def size_bytes(self) -> int:
        return sum(map(count_bytes, self.meta_tensors.values()))

    def _convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return trim_vocabulary_rows(self._config, state_to_hf(self._config, state))

    def __getitem__(self, name: str) -> Tensor:
        layer = self._layer_of_name[name]
        if layer != self._layer:
            self._layer, self._tensors = (), {}
            self._tensors = self._convert({one: self._state[one] for one in layer})
            self._layer = layer
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta_tensors)

    def __len__(self) -> int:
        return len(self.meta_tensors)


def describe_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors for reading dtypes and shapes only, without converting any."""
    return tensors.meta_tensors if isinstance(tensors, ServerTensors) else tensors
