"""The proof of both ends of a connection, before anything else travels, that they know one key.

    client -> server   magic, client's nonce, tag("hello", client's nonce)
    server -> client   server's nonce, tag("server", both nonces)
    client -> server   tag("client", both nonces), and at once its first request

A tag is HMAC-SHA256 under the key, over its purpose, the address that the client wanted, the nonces
and whether what follows is sealed. Who does not know the key gets no byte of an answer, not even a
nonce; a recorded hello gets a proof and no more. The address is in it so that a program which has
taken another port cannot pass an honest client's proofs on to the server. What follows is sealed
with keys made of the nonces and the key, or is as safe as the connection.

Where each process has a key of its own, `key_handshake.py` has the proof.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Protocol

from common.wire.noise import AES_GCM, Cipher

MAGIC = b"MRB2"
NONCE_BYTES = 16
TAG_BYTES = 32
HELLO = struct.Struct(f"<4s{NONCE_BYTES}s{TAG_BYTES}s")
CHALLENGE = struct.Struct(f"<{NONCE_BYTES}s{TAG_BYTES}s")

Ciphers = tuple[Cipher, Cipher]  # to send with, to receive with


class AskingProof(Protocol):
    """The client's part of a handshake, for one connection."""

    challenge_bytes: int
    ciphers: Ciphers | None  # of what follows the proof; None: it is not sealed

    def hello(self) -> bytes:
        """What is sent first."""

    def proof(self, challenge: bytes) -> bytes | None:
        """What answers the server's `challenge_bytes`; None when it is not the one to be asked."""


class AnsweringProof(Protocol):
    """The server's part of a handshake, for one connection."""

    hello_bytes: int
    proof_bytes: int
    ciphers: Ciphers | None

    def whose(self, hello: bytes) -> bytes | None:
        """The public key that the client is to prove; empty: it knows the one key; None: it does
        not know what it must.
        """

    def challenge(self) -> bytes:
        """The answer to a hello, once its sender is to be let in."""

    def proven(self, proof: bytes) -> bool:
        """Whether the client has answered this very challenge."""


def _tag(key: bytes, purpose: bytes, address: str, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((purpose, address.encode(), *nonces)), "sha256")


class _Ends:
    def __init__(self, key: bytes, address: str, sealed: bool = False) -> None:
        """`address`: where the server says that it is."""
        self._key, self._address, self._sealed = key, address, sealed
        self.ciphers: Ciphers | None = None

    def _tag(self, purpose: bytes, *nonces: bytes) -> bytes:
        return _tag(self._key, purpose + b" sealed" * self._sealed, self._address, *nonces)

    def _cipher(self, sender: bytes, *nonces: bytes) -> Cipher:
        return Cipher(AES_GCM, self._tag(b"sent by the " + sender, *nonces))


class Asking(_Ends):
    """The client's part."""

    challenge_bytes = CHALLENGE.size

    def hello(self) -> bytes:
        """What is sent first, HELLO.size bytes."""
        self._nonce = os.urandom(NONCE_BYTES)
        return HELLO.pack(MAGIC, self._nonce, self._tag(b"hello", self._nonce))

    def proof(self, challenge: bytes) -> bytes | None:
        """The TAG_BYTES that answer the server's challenge; None when it does not know the key."""
        nonce, tag = CHALLENGE.unpack(challenge)
        both = self._nonce, nonce
        if not hmac.compare_digest(tag, self._tag(b"server", *both)):
            return None
        if self._sealed:
            self.ciphers = self._cipher(b"client", *both), self._cipher(b"server", *both)
        return self._tag(b"client", *both)


class Answering(_Ends):
    """The server's part, for one connection."""

    hello_bytes = HELLO.size
    proof_bytes = TAG_BYTES

    def whose(self, hello: bytes) -> bytes | None:
        """Empty when the client knows the key, else None."""
        magic, self._theirs, tag = HELLO.unpack(hello)
        right = self._tag(b"hello", self._theirs)
        return b"" if magic == MAGIC and hmac.compare_digest(tag, right) else None

    def challenge(self) -> bytes:
        """The answer to a hello that was right, CHALLENGE.size bytes."""
        self._both = self._theirs, os.urandom(NONCE_BYTES)
        return CHALLENGE.pack(self._both[1], self._tag(b"server", *self._both))

    def proven(self, proof: bytes) -> bool:
        """Whether the client has answered this very challenge."""
        if not hmac.compare_digest(proof, self._tag(b"client", *self._both)):
            return False
        if self._sealed:
            both = self._both
            self.ciphers = self._cipher(b"server", *both), self._cipher(b"client", *both)
        return True
