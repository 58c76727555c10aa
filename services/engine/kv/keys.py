"""The names of chunks of keys and values: each is a digest of all that they depend on, the tokens
before them among it, so that equal names mean equal content.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from common.generation.contract import Ints
from common.generation.loading import CHUNK

NAME_BYTES = 32  # as many as the bulk port's digests have
DIGITS = 2 * NAME_BYTES


def domain_of(weights: str, adapter: str, layout: str, policy: str) -> str:
    """The name of what one set of weights computes in one layout, 64 hexadecimal digits: chunks of
    different domains never serve each other. `weights` is the digest of a version's manifest,
    `policy` says what becomes of a cache when other weights come.
    """
    parts = (weights, adapter, layout, policy)
    told = b"".join(len(part).to_bytes(4, "little") + part.encode() for part in parts)
    return blake2b(told, digest_size=NAME_BYTES).hexdigest()


def is_domain(text: str) -> bool:
    """Whether a text from elsewhere can be the name of a domain, and so of a directory."""
    return len(text) == DIGITS and set(text) <= set("0123456789abcdef")


def names_of(domain: str, tokens: Ints, *, tail: bool = False) -> list[str]:
    """The names of the chunks of `tokens` [n], first to last, each 64 hexadecimal digits; with
    `tail` of the last one too if it is not whole.
    """
    row = np.ascontiguousarray(tokens, np.int32).tobytes()
    size = CHUNK * np.dtype(np.int32).itemsize
    end = len(row) if tail else len(row) // size * size
    names, parent = [], bytes.fromhex(domain)
    for at in range(0, end, size):
        parent = blake2b(parent + row[at : at + size], digest_size=NAME_BYTES).digest()
        names.append(parent.hex())
    return names
