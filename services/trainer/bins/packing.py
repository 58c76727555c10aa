"""Packing of finished trajectories into bins: the typed arrays of a gradient computation."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import BadMessage
from meshrl.common.base.lineages import SINGLE_LINEAGE, is_foreign
from meshrl.kernels.packing import pack_rounds

UNKNOWN = -1  # version of a token, or expert, that is not recorded
EXTRA_PREFIX = "extra."  # prefix of extras' names on the wire

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
ExpertIds = NDArray[np.int16]


@dataclass(slots=True)
class TrainingSequence:
    """Tokens [n] of a trajectory, n >= 2, with the arrays that training needs."""

    tokens: Ints
    logprobs: Floats  # of the behaviour policy that sampled the token; 0 where not sampled
    loss_mask: Bools  # tokens that the model wrote
    versions: Ints  # weight version that computed the token
    # [n], or one value. Float64 for one trajectory: `prepare_advantages` may use it as the reward.
    advantages: NDArray[np.floating] = field(default_factory=lambda: np.zeros((), np.float32))
    weight: float = 1.0  # factor of each of its token losses
    extras: dict[str, Floats] = field(default_factory=dict)  # [n] each, such as "reference"
    # [n, layers, k], the routing of the position before each token
    expert_ids: ExpertIds | None = None
    group_id: int = 0
    member_index: int = 0
    abandoned_above: int = SINGLE_LINEAGE  # see meshrl.common.base.lineages
    is_truncated: bool = False  # cut off at the maximum length

    @property
    def position_count(self) -> int:
        """Number of bin positions that the sequence takes: its last token predicts nothing."""
        return len(self.tokens) - 1

    @property
    def loss_token_count(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.loss_mask[1:].sum())


@dataclass(slots=True)
class Bin:
    """Sequences end to end, every array [n]; a token's data is at the position before the token.

    `tokens[i]` is the input and `targets[i]`, the next token of its sequence, is predicted.
    Sequence j has the positions from cu_seqlens[j] to cu_seqlens[j + 1]; positions past
    cu_seqlens[-1] are padding.
    """

    tokens: Ints
    targets: Ints
    positions: Ints
    cu_seqlens: Ints  # [sequences + 1]
    loss_mask: Bools  # the model wrote the target
    fresh_mask: Bools  # and sampled it, with its whole prefix, under the version being trained
    behaviour_logprobs: Floats
    advantages: Floats
    weight: Floats
    extras: dict[str, Floats] = field(default_factory=dict)
    expert_ids: ExpertIds | None = None  # [n, layers, k]

    @property
    def loss_token_count(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.loss_mask.sum())

    @property
    def lengths(self) -> Ints:
        """Number of positions of each sequence, int [s]."""
        return np.diff(self.cu_seqlens)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the bin as named arrays, to be sent."""
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _DTYPES}
        arrays |= {EXTRA_PREFIX + name: array for name, array in self.extras.items()}
        return arrays if self.expert_ids is None else arrays | {"expert_ids": self.expert_ids}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Bin:
        """Return the bin of named arrays; BadMessage unless all are present, and fit together."""
        extras = {name: array for name, array in arrays.items() if name.startswith(EXTRA_PREFIX)}
        known = {name: array for name, array in arrays.items() if name not in extras}
        experts = known.pop("expert_ids", None)
        if set(known) != set(_DTYPES):
            raise BadMessage(f"a bin must have the arrays {sorted(_DTYPES)}, not {sorted(known)}")
        places = known["tokens"].shape
        for name, array in (known | extras).items():
            shape = places if name != "cu_seqlens" else (len(array),)
            if array.dtype != _DTYPES.get(name, np.float32) or array.shape != shape:
                raise BadMessage(f"array {name} of a bin is {array.dtype}{list(array.shape)}")
        if experts is not None and (experts.dtype != np.int16 or experts.shape[:1] != places):
            raise BadMessage(f"expert_ids of a bin are {experts.dtype}{list(experts.shape)}")
        starts = known["cu_seqlens"]
        rising = len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
        if len(places) != 1 or not rising or int(starts[-1]) > places[0]:
            raise BadMessage("cu_seqlens of a bin does not increase within its positions")
        return cls(
            **{name: _make_writable(array) for name, array in known.items()},
            extras={
                name.removeprefix(EXTRA_PREFIX): _make_writable(a) for name, a in extras.items()
            },
            expert_ids=None if experts is None else _make_writable(experts),
        )


_DTYPES: dict[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "cu_seqlens": np.int32,
    "loss_mask": np.bool_,
    "fresh_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "advantages": np.float32,
    "weight": np.float32,
}


def make_bins(
    sequences: Many[TrainingSequence], max_tokens: int, version: int = UNKNOWN
) -> list[Bin]:
    """Pack every sequence into one bin of at most `max_tokens` positions, deterministically.

    A sequence longer than `max_tokens` gets a bin of its own. `version` is the one being trained:
    it decides which tokens are fresh. Raise ValueError for a sequence of fewer than two tokens,
    which has no target.
    """
    return [build_bin(members, version) for members in pack_sequences(sequences, max_tokens)]


def pack_sequences(
    sequences: Many[TrainingSequence], max_tokens: int
) -> list[list[TrainingSequence]]:
    """Return the sequences of each bin; the order of the input does not matter."""
    _reject_empty(sequences)
    ordered = sorted(sequences, key=lambda s: (-s.position_count, s.group_id, s.member_index))
    rounds = pack_rounds([s.position_count for s in ordered], max_tokens)
    return [[ordered[i] for i in bin] for (bin,) in rounds]


def build_bin(sequences: Many[TrainingSequence], version: int = UNKNOWN) -> Bin:
    """Return the bin of these sequences in this order; it may be empty."""
    _reject_empty(sequences)
    starts = np.cumsum([0] + [s.position_count for s in sequences], dtype=np.int32)
    names = sorted({name for s in sequences for name in s.extras})
    advantages = [np.broadcast_to(s.advantages, s.tokens.shape)[1:] for s in sequences]
    return Bin(
        tokens=_concatenate([s.tokens[:-1] for s in sequences], np.int32),
        targets=_concatenate([s.tokens[1:] for s in sequences], np.int32),
        positions=_concatenate([np.arange(s.position_count) for s in sequences], np.int32),
        cu_seqlens=starts,
        loss_mask=_concatenate([s.loss_mask[1:] for s in sequences], np.bool_),
        fresh_mask=_concatenate([find_fresh_tokens(s, version)[1:] for s in sequences], np.bool_),
        behaviour_logprobs=_concatenate([s.logprobs[1:] for s in sequences], np.float32),
        advantages=_concatenate(advantages, np.float32),
        weight=_concatenate([np.full(s.position_count, s.weight) for s in sequences], np.float32),
        extras={n: _concatenate([s.extras[n][1:] for s in sequences], np.float32) for n in names},
        expert_ids=_stack_expert_ids(sequences),
    )


def find_fresh_tokens(sequence: TrainingSequence, version: int) -> Bools:
    """Return the mask of sampled tokens that were computed, with their prefix, under `version`.

    Tokens of unknown version (a prompt whose prefill version is not recorded) do not count against
    it. A version of that number from an abandoned lineage had other weights.
    """
    if version == UNKNOWN or is_foreign(version, sequence.abandoned_above):
        return np.zeros_like(sequence.loss_mask)
    own = sequence.versions == version
    prefix_mask = np.logical_and.accumulate(own | (sequence.versions == UNKNOWN))
    found: Bools = prefix_mask & own & sequence.loss_mask
    return found


def _reject_empty(sequences: Many[TrainingSequence]) -> None:
    if any(s.position_count < 1 for s in sequences):
        raise ValueError("a training sequence has fewer than two tokens")


def _concatenate(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _stack_expert_ids(sequences: Many[TrainingSequence]) -> ExpertIds | None:
    shape = next((s.expert_ids.shape[1:] for s in sequences if s.expert_ids is not None), None)
    if shape is None:
        return None
    unknown = [np.full((s.position_count, *shape), UNKNOWN, np.int16) for s in sequences]
    rows = [
        u if s.expert_ids is None else s.expert_ids[1:]
        for u, s in zip(unknown, sequences, strict=True)
    ]
    return _concatenate(rows, np.int16)


def _make_writable(array: NDArray[Any]) -> NDArray[Any]:
    return np.require(array, requirements="W")
