"""Packs finished trajectories into bins: the typed arrays that a gradient is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import BadMessage
from meshrl.common.base.lineages import NATIVE, foreign
from meshrl.kernels.packing import pack_rounds

UNKNOWN = -1  # version of a token whose version nobody recorded, expert that nobody recorded
EXTRA = "extra."  # what names of extras start with on a wire

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
ExpertIds = NDArray[np.int16]


@dataclass(slots=True)
class Sequence:
    """A trajectory's tokens [n], n >= 2, as training needs them."""

    tokens: Ints
    logprobs: Floats  # behaviour: of the policy that sampled the token; 0 where not sampled
    mask: Bools  # the model's own tokens
    versions: Ints  # weight version that computed the token
    # [n], or one; of one trajectory float64: `prepare` may take it for the reward that it is.
    advantages: NDArray[np.floating] = field(default_factory=lambda: np.zeros((), np.float32))
    weight: float = 1.0  # factor of each of its token losses
    extras: dict[str, Floats] = field(default_factory=dict)  # [n] each, such as "reference"
    experts: ExpertIds | None = None  # [n, layers, k], that the place before a token was routed to
    group: int = 0
    member: int = 0
    foreign_above: int = NATIVE  # see meshrl.common.base.lineages
    truncated: bool = False  # cut off at the longest length

    @property
    def places(self) -> int:
        """The places of a bin that it takes: its last token predicts nothing."""
        return len(self.tokens) - 1

    @property
    def trained(self) -> int:
        """The number of tokens that carry loss."""
        return int(self.mask[1:].sum())


@dataclass(slots=True)
class Bin:
    """Sequences end to end, every array [n]; what describes a token lies at the place before it.

    So `tokens[i]` is read and `targets[i]`, the next token of its sequence, is predicted. Sequence
    j holds the places from starts[j] to starts[j + 1]; what lies past starts[-1] is padding.
    """

    tokens: Ints
    targets: Ints
    positions: Ints
    starts: Ints  # [sequences + 1]
    mask: Bools  # the target is the model's own
    fresh: Bools  # and was sampled, with all that lies before it, under the version being trained
    behaviour: Floats
    advantage: Floats
    weight: Floats
    extras: dict[str, Floats] = field(default_factory=dict)
    experts: ExpertIds | None = None  # [n, layers, k]

    @property
    def trained(self) -> int:
        """The number of tokens that carry loss."""
        return int(self.mask.sum())

    @property
    def lengths(self) -> Ints:
        """The places of each sequence, int [s]."""
        return np.diff(self.starts)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The bin as named arrays, to be sent."""
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _DTYPES}
        arrays |= {EXTRA + name: array for name, array in self.extras.items()}
        return arrays if self.experts is None else arrays | {"experts": self.experts}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Bin:
        """The inverse of `to_arrays`; BadMessage unless every array is there, alike and typed."""
        extras = {name: array for name, array in arrays.items() if name.startswith(EXTRA)}
        known = {name: array for name, array in arrays.items() if name not in extras}
        experts = known.pop("experts", None)
        if set(known) != set(_DTYPES):
            raise BadMessage(f"a bin has the arrays {sorted(_DTYPES)}, not {sorted(known)}")
        places = known["tokens"].shape
        for name, array in (known | extras).items():
            shape = places if name != "starts" else (len(array),)
            if array.dtype != _DTYPES.get(name, np.float32) or array.shape != shape:
                raise BadMessage(f"array {name} of a bin is {array.dtype}{list(array.shape)}")
        if experts is not None and (experts.dtype != np.int16 or experts.shape[:1] != places):
            raise BadMessage(f"experts of a bin are {experts.dtype}{list(experts.shape)}")
        starts = known["starts"]
        rising = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
        if len(places) != 1 or not rising or int(starts[-1]) > places[0]:
            raise BadMessage("the starts of a bin's sequences do not rise within its places")
        return cls(
            **{name: _writable(array) for name, array in known.items()},
            extras={name.removeprefix(EXTRA): _writable(a) for name, a in extras.items()},
            experts=None if experts is None else _writable(experts),
        )


_DTYPES: dict[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "starts": np.int32,
    "mask": np.bool_,
    "fresh": np.bool_,
    "behaviour": np.float32,
    "advantage": np.float32,
    "weight": np.float32,
}


def make_bins(sequences: Many[Sequence], budget: int, version: int = UNKNOWN) -> list[Bin]:
    """Every sequence in one bin of at most `budget` places, packed alike wherever it is done.

    `version` is the one being trained: it decides which tokens are fresh. A sequence that is longer
    than the budget gets a bin of its own. ValueError if a sequence has fewer than two tokens, of
    which nothing can be learned.
    """
    return [fill(members, version) for members in packed(sequences, budget)]


def packed(sequences: Many[Sequence], budget: int) -> list[list[Sequence]]:
    """The sequences of each bin; the order in which they are given does not matter."""
    _refuse_empty(sequences)
    ordered = sorted(sequences, key=lambda s: (-s.places, s.group, s.member))
    rounds = pack_rounds([s.places for s in ordered], budget)
    return [[ordered[i] for i in bin] for (bin,) in rounds]


def fill(sequences: Many[Sequence], version: int = UNKNOWN) -> Bin:
    """The bin that holds these sequences, in this order; it may hold none."""
    _refuse_empty(sequences)
    starts = np.cumsum([0] + [s.places for s in sequences], dtype=np.int32)
    names = sorted({name for s in sequences for name in s.extras})
    advantages = [np.broadcast_to(s.advantages, s.tokens.shape)[1:] for s in sequences]
    return Bin(
        tokens=_joined([s.tokens[:-1] for s in sequences], np.int32),
        targets=_joined([s.tokens[1:] for s in sequences], np.int32),
        positions=_joined([np.arange(s.places) for s in sequences], np.int32),
        starts=starts,
        mask=_joined([s.mask[1:] for s in sequences], np.bool_),
        fresh=_joined([fresh(s, version)[1:] for s in sequences], np.bool_),
        behaviour=_joined([s.logprobs[1:] for s in sequences], np.float32),
        advantage=_joined(advantages, np.float32),
        weight=_joined([np.full(s.places, s.weight) for s in sequences], np.float32),
        extras={n: _joined([s.extras[n][1:] for s in sequences], np.float32) for n in names},
        experts=_experts(sequences),
    )


def fresh(sequence: Sequence, version: int) -> Bools:
    """The model's tokens that, with all that lies before them, were computed under `version`.

    Tokens of unknown version (a prompt whose prefill nobody recorded) do not count against it. An
    abandoned lineage's version of that number was of other weights.
    """
    if version == UNKNOWN or foreign(version, sequence.foreign_above):
        return np.zeros_like(sequence.mask)
    own = sequence.versions == version
    whole = np.logical_and.accumulate(own | (sequence.versions == UNKNOWN))
    found: Bools = whole & own & sequence.mask
    return found


def _refuse_empty(sequences: Many[Sequence]) -> None:
    if any(s.places < 1 for s in sequences):
        raise ValueError("a sequence to train on has fewer than two tokens")


def _joined(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _experts(sequences: Many[Sequence]) -> ExpertIds | None:
    shape = next((s.experts.shape[1:] for s in sequences if s.experts is not None), None)
    if shape is None:
        return None
    unknown = [np.full((s.places, *shape), UNKNOWN, np.int16) for s in sequences]
    rows = [
        u if s.experts is None else s.experts[1:] for u, s in zip(unknown, sequences, strict=True)
    ]
    return _joined(rows, np.int16)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    return np.require(array, requirements="W")
