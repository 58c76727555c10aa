"""The CURVE key pairs by which processes of a mesh know each other over ZeroMQ, one for each role.

All are derived from the mesh's secret, so a process knows the public key of every role without
asking anybody. Whatever else finds out a peer's role from its key, or the key of a process to be
called, belongs here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from common.errors import ConfigError
from common.secret import derived

_MESH = "curve/mesh"  # purpose of the key pair that everybody answers with


@dataclass(frozen=True)
class KeyPair:
    """A key pair for CURVE; both halves are 40 characters of Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def derived(cls, secret: str, purpose: str) -> KeyPair:
        """The pair of this purpose under the mesh's `secret`: the same in every process."""
        own = z85.encode(derived(secret, purpose))
        return cls(zmq.curve_public(own), own)


class MeshKeys:
    """What a process of `role` proves itself with, and knows its peers by.

    Nobody outside knows even the public key that all processes answer with, and a handshake begins
    with a box that only its knowledge can make: a stranger is not answered.
    """

    def __init__(self, secret: str, role: str, roles: Iterable[str]) -> None:
        """ConfigError: the mesh has no such role."""
        self.answering = KeyPair.derived(secret, _MESH)
        pairs = {one: KeyPair.derived(secret, f"curve/{one}") for one in roles}
        if role not in pairs:
            raise ConfigError(
                f"{role!r} is no role of a process; there are {', '.join(sorted(pairs))}",
                where="common/api/callers.py",
            )
        self.asking = pairs[role]
        self._roles = {pair.public: one for one, pair in pairs.items()}

    def role_of(self, public: bytes) -> str | None:
        """The role that holds this public key; None: nobody of this mesh does."""
        return self._roles.get(public)
