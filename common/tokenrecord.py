"""Tokens of many trajectories as one record of the ledger: some 11 bytes each when a record holds
one token of each trajectory.

    head     format, widths in bytes of the four columns below, rows, tokens, runs, first group
    rows     group less the first one, member, count (width 0: all are 1), a column each
    runs     weight version i32 and how many tokens it sampled u32, a column each
    tokens   ids, in the smallest width of 1 to 4 bytes that fits the largest
    logprobs float32 as they are: they are training data

All little-endian; row i owns the next `counts[i]` tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import BadMessage

FORMAT = 1
_HEAD = struct.Struct("<5B3x3Iq")  # 3 spare bytes keep the numbers aligned
MEMBER_BITS = 12  # of a trajectory's number, below its group's
_MEMBER = (1 << MEMBER_BITS) - 1
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class TokenRows:
    """New tokens of trajectories: row i owns the next `counts[i]` entries of the token columns."""

    ids: NDArray[np.int64]  # trajectories
    counts: NDArray[np.int32]  # at least 1
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]  # of the weights that sampled each


def pack(rows: TokenRows) -> bytes:
    """The record's bytes; there is at least one row, and no row without a token."""
    groups = rows.ids >> MEMBER_BITS
    first = int(groups.min())
    members = rows.ids & _MEMBER
    groups = groups - first
    single = len(rows.tokens) == len(rows.ids)
    changes = np.flatnonzero(rows.versions[1:] != rows.versions[:-1])
    starts = np.concatenate((np.zeros(1, np.int64), changes + 1))
    lengths = np.diff(starts, append=len(rows.versions))
    tokens = rows.tokens.view(np.uint32)
    widths = (_width(groups), _width(members), 0 if single else _width(rows.counts))
    narrow = _token_width(tokens)
    head = _HEAD.pack(FORMAT, *widths, narrow, len(rows.ids), len(tokens), len(starts), first)
    return b"".join(
        (
            head,
            groups.astype(_UNSIGNED[widths[0]]).tobytes(),
            members.astype(_UNSIGNED[widths[1]]).tobytes(),
            b"" if single else rows.counts.astype(_UNSIGNED[widths[2]]).tobytes(),
            rows.versions[starts].tobytes(),
            lengths.astype(np.uint32).tobytes(),
            tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :narrow].tobytes(),
            rows.logprobs.tobytes(),
        )
    )


def unpack(content: bytes) -> TokenRows:
    """What `pack` was given; BadMessage if this is of another format, or no such record."""
    if len(content) < _HEAD.size or content[0] != FORMAT:
        raise BadMessage(
            f"tokens in format {content[0] if content else 'none'}; this is format {FORMAT}",
            where="ledger",
            fix="finish the run with the version of the software that began it",
        )
    _, wide, member, count, narrow, n, total, runs, first = _HEAD.unpack_from(content)
    sizes = (n * wide, n * member, n * count, 4 * runs, 4 * runs, total * narrow, 4 * total)
    if len(content) != _HEAD.size + sum(sizes) or not {wide, member, count or 1} <= {1, 2, 4, 8}:
        raise BadMessage("a record of tokens whose columns do not add up", where="ledger")
    parts, at = [], _HEAD.size
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    groups = np.frombuffer(parts[0], _UNSIGNED[wide]).astype(np.int64) + first
    ids = groups << MEMBER_BITS | np.frombuffer(parts[1], _UNSIGNED[member]).astype(np.int64)
    ones = np.ones(n, np.int32)
    lengths = np.frombuffer(parts[4], np.uint32)
    padded = np.zeros((total, 4), np.uint8)
    padded[:, :narrow] = np.frombuffer(parts[5], np.uint8).reshape(total, narrow)
    return TokenRows(
        ids=ids,
        counts=np.frombuffer(parts[2], _UNSIGNED[count]).astype(np.int32) if count else ones,
        tokens=padded.reshape(-1).view("<i4"),
        logprobs=np.frombuffer(parts[6], np.float32),
        versions=np.repeat(np.frombuffer(parts[3], np.int32), lengths),
    )


def _width(column: NDArray[np.integer]) -> int:
    """Bytes that hold the largest of these, none below 0."""
    largest = int(column.max())
    return next(width for width in _UNSIGNED if largest < 1 << 8 * width)


def _token_width(tokens: NDArray[np.uint32]) -> int:
    return max(1, (int(tokens.max()).bit_length() + 7) // 8)
