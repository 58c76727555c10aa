"""Encoding of many trajectories' tokens as one record of the ledger.

A record with one token of each trajectory takes about 11 bytes per token, and one or two more for
each expert.

    head     format, widths in bytes of the five columns below, experts per token, rows, tokens,
             runs, first group
    rows     group minus the first one, member, count (width 0: all are 1), a column each
    runs     weight version i32 and number of tokens it sampled u32, a column each
    tokens   ids, in the smallest width of 1 to 4 bytes that fits the largest
    logprobs float32, unchanged: they are training data
    experts  of each token in turn: u8 if all are known and fit, else i16 (width 0: none)

All values are little-endian. Row i owns the next `counts[i]` tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import BadMessage
from meshrl.common.base.expert_routing import NO_EXPERTS

FORMAT = 1
_HEADER = struct.Struct("<6BH3Iq")
MEMBER_BITS = 12  # low bits of a trajectory's number; the group is above
_MEMBER_MASK = (1 << MEMBER_BITS) - 1
_UNSIGNED_BY_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_EXPERT_TYPES_BY_WIDTH = {1: np.uint8, 2: np.int16}
_MAX_TOKEN_BYTES = 24  # maximum size of a token without its experts


@dataclass(frozen=True, slots=True)
class TokenRows:
    """New tokens of trajectories: row i owns the next `counts[i]` entries of the token columns."""

    trajectory_ids: NDArray[np.int64]  # trajectory numbers
    counts: NDArray[np.int32]  # at least 1
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]  # weight version that sampled each token
    expert_ids: NDArray[np.int16] = field(default_factory=lambda: NO_EXPERTS)  # see `experts`

    def slice_token_columns(
        self, selection: slice | NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.int16]]:
        """Return the entries of the token columns for the selected tokens."""
        experts = self.expert_ids[selection] if self.expert_ids.shape[1] else self.expert_ids
        return self.tokens[selection], self.logprobs[selection], self.versions[selection], experts


def select_rows(rows: TokenRows, mask: NDArray[np.bool_]) -> TokenRows:
    """Return the selected rows with their tokens."""
    if rows.counts[~mask].any():
        tokens = np.repeat(mask, rows.counts)
        columns = rows.slice_token_columns(tokens)
    else:
        columns = rows.slice_token_columns(slice(None))
    return TokenRows(rows.trajectory_ids[mask], rows.counts[mask], *columns)


def split_by_size(rows: TokenRows, max_bytes: int) -> Iterator[TokenRows]:
    """Split the rows into parts whose records have at most `max_bytes`, unless one row is
    larger.
    """
    ends = np.cumsum(rows.counts)
    most = max(1, max_bytes // (_MAX_TOKEN_BYTES + 2 * rows.expert_ids.shape[1]))
    row = token = 0
    while row < len(ends):
        until = max(int(np.searchsorted(ends, token + most, side="right")), row + 1)
        columns = rows.slice_token_columns(slice(token, int(ends[until - 1])))
        yield TokenRows(rows.trajectory_ids[row:until], rows.counts[row:until], *columns)
        row, token = until, int(ends[until - 1])


def encode_token_rows(rows: TokenRows) -> bytes:
    """Return the record's bytes; there is at least one row, and each row has a token."""
    groups = rows.trajectory_ids >> MEMBER_BITS
    first = int(groups.min())
    members = rows.trajectory_ids & _MEMBER_MASK
    groups = groups - first
    single = len(rows.tokens) == len(rows.trajectory_ids)
    changes = np.flatnonzero(rows.versions[1:] != rows.versions[:-1])
    starts = np.concatenate((np.zeros(1, np.int64), changes + 1))
    lengths = np.diff(starts, append=len(rows.versions))
    tokens = rows.tokens.view(np.uint32)
    widths = (
        _choose_width(groups),
        _choose_width(members),
        0 if single else _choose_width(rows.counts),
    )
    narrow = max(1, (int(tokens.max()).bit_length() + 7) // 8)
    wide = 0
    if rows.expert_ids.size:
        wide = 1 if int(rows.expert_ids.min()) >= 0 and int(rows.expert_ids.max()) <= 255 else 2
    shape = (rows.expert_ids.shape[1], len(rows.trajectory_ids), len(tokens), len(starts))
    head = _HEADER.pack(FORMAT, *widths, narrow, wide, *shape, first)
    return b"".join(
        (
            head,
            groups.astype(_UNSIGNED_BY_WIDTH[widths[0]]).tobytes(),
            members.astype(_UNSIGNED_BY_WIDTH[widths[1]]).tobytes(),
            b"" if single else rows.counts.astype(_UNSIGNED_BY_WIDTH[widths[2]]).tobytes(),
            rows.versions[starts].tobytes(),
            lengths.astype(np.uint32).tobytes(),
            tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :narrow].tobytes(),
            rows.logprobs.tobytes(),
            rows.expert_ids.astype(_EXPERT_TYPES_BY_WIDTH[wide]).tobytes() if wide else b"",
        )
    )


def decode_token_rows(content: bytes) -> TokenRows:
    """Decode the bytes of `encode_token_rows`. BadMessage: another format, or no such record."""
    if len(content) < _HEADER.size or content[0] != FORMAT:
        raise BadMessage(
            f"the tokens have format {content[0] if content else 'none'}; this version reads "
            f"format {FORMAT}",
            where="ledger",
            fix="Finish the run with the MeshRL version that started it",
        )
    _, wide, member, count, narrow, expert, each, n, total, runs, first = _HEADER.unpack_from(
        content
    )
    fixed = (n * wide, n * member, n * count, 4 * runs, 4 * runs, total * narrow, 4 * total)
    sizes = (*fixed, total * each * expert)
    known = {wide, member, count or 1} <= {1, 2, 4, 8} and expert in (0, *_EXPERT_TYPES_BY_WIDTH)
    if len(content) != _HEADER.size + sum(sizes) or not known:
        raise BadMessage("the columns of a token record are inconsistent", where="ledger")
    parts, at = [], _HEADER.size
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    groups = np.frombuffer(parts[0], _UNSIGNED_BY_WIDTH[wide]).astype(np.int64) + first
    ids = groups << MEMBER_BITS | np.frombuffer(parts[1], _UNSIGNED_BY_WIDTH[member]).astype(
        np.int64
    )
    ones = np.ones(n, np.int32)
    lengths = np.frombuffer(parts[4], np.uint32)
    padded = np.zeros((total, 4), np.uint8)
    padded[:, :narrow] = np.frombuffer(parts[5], np.uint8).reshape(total, narrow)
    experts = NO_EXPERTS
    if expert:
        experts = (
            np.frombuffer(parts[7], _EXPERT_TYPES_BY_WIDTH[expert])
            .astype(np.int16)
            .reshape(-1, each)
        )
    return TokenRows(
        trajectory_ids=ids,
        counts=np.frombuffer(parts[2], _UNSIGNED_BY_WIDTH[count]).astype(np.int32)
        if count
        else ones,
        tokens=padded.reshape(-1).view("<i4"),
        logprobs=np.frombuffer(parts[6], np.float32),
        versions=np.repeat(np.frombuffer(parts[3], np.int32), lengths),
        expert_ids=experts,
    )


def _choose_width(column: NDArray[np.integer]) -> int:
    largest = int(column.max())
    return next(width for width in _UNSIGNED_BY_WIDTH if largest < 1 << 8 * width)
