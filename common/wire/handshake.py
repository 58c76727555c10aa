"""The proof of both ends of a connection, before anything else travels, that they know one key.

    client -> server   magic, client's nonce, tag("hello", client's nonce)
    server -> client   server's nonce, tag("server", both nonces)
    client -> server   tag("client", both nonces), and at once its first request

A tag is HMAC-SHA256 under the key, over its purpose, the address that the client wanted and the
nonces. Who does not know the key gets no byte of an answer, not even a nonce; a recorded hello gets
a proof and no more. The address is in it so that a program which has taken another port cannot pass
an honest client's proofs on to the server. What follows is neither encrypted nor signed: it is as
safe as the connection.
"""

from __future__ import annotations

import hmac
import os
import struct

MAGIC = b"MRB2"
NONCE_BYTES = 16
TAG_BYTES = 32
HELLO = struct.Struct(f"<4s{NONCE_BYTES}s{TAG_BYTES}s")
CHALLENGE = struct.Struct(f"<{NONCE_BYTES}s{TAG_BYTES}s")


def _tag(key: bytes, purpose: bytes, address: str, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((purpose, address.encode(), *nonces)), "sha256")


class Asking:
    """The client's part. `address`: where the server says that it is."""

    def __init__(self, key: bytes, address: str) -> None:
        self._key, self._address = key, address
        self._nonce = os.urandom(NONCE_BYTES)

    def hello(self) -> bytes:
        """What is sent first, HELLO.size bytes."""
        return HELLO.pack(MAGIC, self._nonce, _tag(self._key, b"hello", self._address, self._nonce))

    def proof(self, challenge: bytes) -> bytes | None:
        """The TAG_BYTES that answer the server's challenge; None when it does not know the key."""
        nonce, tag = CHALLENGE.unpack(challenge)
        both = self._nonce, nonce
        if not hmac.compare_digest(tag, _tag(self._key, b"server", self._address, *both)):
            return None
        return _tag(self._key, b"client", self._address, *both)


class Answering:
    """The server's part, for one connection. `address`: where it says that it is."""

    def __init__(self, key: bytes, address: str) -> None:
        self._key, self._address = key, address
        self._proof = b""  # what the client is to send

    def challenge(self, hello: bytes) -> bytes | None:
        """The answer to a hello; None when the client does not know the key."""
        magic, theirs, tag = HELLO.unpack(hello)
        right = _tag(self._key, b"hello", self._address, theirs)
        if magic != MAGIC or not hmac.compare_digest(tag, right):
            return None
        both = theirs, os.urandom(NONCE_BYTES)
        self._proof = _tag(self._key, b"client", self._address, *both)
        return CHALLENGE.pack(both[1], _tag(self._key, b"server", self._address, *both))

    def proven(self, proof: bytes) -> bool:
        """Whether the client has answered this very challenge."""
        return bool(self._proof) and hmac.compare_digest(proof, self._proof)
