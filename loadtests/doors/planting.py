"""Attempts to have other processes run foreign bytes.

They cover everything that a process of any role can put at the weight store's bulk port in place of
a job's code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.api.transfer.bulk_permissions import PUBLISHED, SPACES
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import MeshError, NotFound
from meshrl.common.mesh.transport.address import parse_bulk_key
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.session import PUT, BulkSession
from meshrl.common.weights.handshakes.handshake import ClientHandshake

DEADLINE_S = 30.0
LARGEST_BYTES = 1 << 20  # of a file that is tried
READER = "trainer"  # a role with full read access


@dataclass
class Planting:
    """Attempts, and those that left bytes where code is fetched from."""

    tried: int = 0
    planted: list[str] = field(default_factory=list)


def plant(
    keys: Mapping[str, X25519PrivateKey], store: RegistryEntry, files: Mapping[str, int]
) -> Planting:
    """Try to plant code as each role with its key, and read the result as a permitted role. `files`
    has the bytes of each file of a job's code by digest.
    """
    found = Planting()
    for role, key in keys.items():
        for what, space, digest, content in _attempts(role, files):
            found.tried += 1
            with suppress(MeshError), _session(key, store) as session:
                session.request(PUT, digest, content, space=space)
            with suppress(NotFound), _session(keys[READER], store) as session:
                if (
                    session.fetch_chunk(digest, PUBLISHED) == content
                ):  # fetched as the job's would be
                    found.planted.append(f"{role}: {what} in space {space!r}")
    return found


def _attempts(role: str, files: Mapping[str, int]) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield the attempts: description, space, digest and bytes."""
    for space in SPACES:
        for digest, size in files.items():
            yield f"other bytes as {digest[:8]}", space, digest, os.urandom(size)
    own = f"raise SystemExit('planted by {role}')".encode()
    yield "bytes of its own among what is published", PUBLISHED, compute_digest(own), own


def _session(key: X25519PrivateKey, store: RegistryEntry) -> BulkSession:
    place = store.bulk.partition("#")[0]
    proof = ClientHandshake(key, parse_bulk_key(store.address), place, sealed=False)
    return BulkSession(place, proof, DEADLINE_S, LARGEST_BYTES)
