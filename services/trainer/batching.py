"""From finished trajectories to bins: the typed arrays that a gradient is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import BadMessage
from kernels.packing import Layout, pack

PADDING = -1  # segment of a place that holds no token
UNKNOWN = -1  # version of a token whose version nobody recorded

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(slots=True)
class Sequence:
    """A trajectory's tokens [n], n >= 2, as training needs them."""

    tokens: Ints
    logprobs: Floats  # behaviour: of the policy that sampled the token; 0 where not sampled
    mask: Bools  # the model's own tokens
    versions: Ints  # weight version that computed the token
    advantage: float = 0.0


@dataclass(slots=True)
class Bin:
    """Packed rows, every array [rows, width]; what describes a token lies at the place before it.

    So `tokens[r, i]` is read and `targets[r, i]`, the next token of its sequence, is predicted.
    """

    tokens: Ints
    targets: Ints
    positions: Ints
    segments: Ints  # sequences of a row count from 0; PADDING elsewhere
    mask: Bools  # the target is the model's own
    fresh: Bools  # and was sampled, with all that lies before it, under the version being trained
    behaviour: Floats
    advantage: Floats

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.tokens.shape
        return rows, width

    @property
    def trained(self) -> int:
        """Tokens that carry loss."""
        return int(self.mask.sum())

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """What goes over a wire."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Bin:
        """The inverse of `to_arrays`; BadMessage unless every array is there, alike and typed."""
        if set(arrays) != set(_DTYPES):
            raise BadMessage(f"a bin has the arrays {sorted(_DTYPES)}, not {sorted(arrays)}")
        shape = arrays["tokens"].shape
        for name, array in arrays.items():
            if array.dtype != _DTYPES[name] or array.shape != shape or array.ndim != 2:
                raise BadMessage(f"array {name} of a bin is {array.dtype}{list(array.shape)}")
        return cls(**{name: np.require(array, requirements="W") for name, array in arrays.items()})


_DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "mask": np.bool_,
    "fresh": np.bool_,
    "behaviour": np.float32,
    "advantage": np.float32,
}


def make_bins(sequences: Many[Sequence], budget: int, version: int = UNKNOWN) -> list[Bin]:
    """Every sequence in one bin of at most `budget` places, packed alike wherever it is done.

    `version` is the one being trained: it decides which tokens are fresh. ValueError if a sequence
    has fewer than two tokens, of which nothing can be learned.
    """
    layouts = pack([len(sequence.tokens) - 1 for sequence in sequences], budget)
    return [_fill(layout, sequences, version) for layout in layouts]


def _fill(layout: Layout, sequences: Many[Sequence], version: int) -> Bin:
    shape = layout.rows, layout.width
    made = Bin(**{name: np.zeros(shape, dtype) for name, dtype in _DTYPES.items()})
    made.segments.fill(PADDING)
    segments = [0] * layout.rows
    for item, row, start in zip(layout.item, layout.row, layout.start, strict=True):
        sequence = sequences[item]
        length = len(sequence.tokens) - 1
        places = slice(start, start + length)
        made.tokens[row, places] = sequence.tokens[:-1]
        made.targets[row, places] = sequence.tokens[1:]
        made.positions[row, places] = np.arange(length)
        made.segments[row, places] = segments[row]
        made.mask[row, places] = sequence.mask[1:]
        made.fresh[row, places] = fresh(sequence, version)[1:]
        made.behaviour[row, places] = sequence.logprobs[1:]
        made.advantage[row, places] = sequence.advantage
        segments[row] += 1
    return made


def fresh(sequence: Sequence, version: int) -> Bools:
    """The model's tokens that, with all that lies before them, were computed under `version`.

    Tokens of unknown version (a prompt whose prefill nobody recorded) do not count against it.
    """
    same = (sequence.versions == version) | (sequence.versions == UNKNOWN)
    whole: Bools = np.logical_and.accumulate(same) & sequence.mask
    return whole & (sequence.versions == version) if version != UNKNOWN else np.zeros_like(whole)
