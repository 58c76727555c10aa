"""Handshake of a connection to a bulk port, before anything else travels: Noise's IK, with key
pairs that the processes have for it alone, registered beside those for CURVE.

    client -> server   magic, e, es, s, ss, whether the client wants what follows sealed
    server -> client   e, ee, se, whether it is
    client -> server   an empty message, which proves that this is no recording; its first request

The client knows the server's key from its address; the server looks up whose key the client tells
before it answers. What both hear first (the prologue) is the magic and the address that the client
wanted. What follows is sealed if either end wants that; otherwise it is as safe as the connection.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.weights.handshakes.noise import (
    AES_GCM,
    CHACHA_POLY,
    TAG_BYTES,
    Cipher,
    Initiator,
    Refusal,
    Responder,
)

Ciphers = tuple[Cipher, Cipher]  # to send with, to receive with

SUITES = {b"MRA3": AES_GCM, b"MRC3": CHACHA_POLY}
_AES, _CHACHA = SUITES
MAGIC_BYTES = 4
SEALED, PLAIN = b"\x01", b"\x00"


def _preferred() -> bytes:
    """AES-GCM takes 0.11 s of CPU a GB where the processor has instructions for it, a third of
    ChaCha20-Poly1305's; where it has none it is many times slower. The suite's magic.
    """
    found = Path("/proc/cpuinfo")
    told = found.read_text().lower().replace("\n", " ").split(" ") if found.exists() else ["aes"]
    return _AES if "aes" in told else _CHACHA


class ClientHandshake:
    """The client's part. `server`: its public key; `address`: where it says that it is."""

    challenge_bytes = 32 + 1 + TAG_BYTES

    def __init__(
        self, own: X25519PrivateKey, server: bytes, address: str, sealed: bool, magic: bytes = b""
    ) -> None:
        """`magic`: of a suite; the one this machine is fastest with if not given."""
        self._magic, self._sealed = magic or PREFERRED, sealed
        prologue = self._magic + address.encode()
        self._noise = Initiator(SUITES[self._magic], own, server, prologue)
        self.ciphers: Ciphers | None = None  # of what follows the proof; None: it is not sealed

    def hello(self) -> bytes:
        """What is sent first."""
        return self._magic + self._noise.first(SEALED if self._sealed else PLAIN)

    def proof(self, challenge: bytes) -> bytes | None:
        """The TAG_BYTES that answer the server's challenge; None when it has another key, or will
        not seal what this end wants sealed.
        """
        try:
            answer, sends, receives = self._noise.finish(challenge)
        except Refusal:
            return None
        if self._sealed and answer != SEALED:
            return None
        proof = bytearray(TAG_BYTES)
        sends.seal(b"", proof)
        if answer == SEALED:
            self.ciphers = sends, receives
        return bytes(proof)


class ServerHandshake:
    """The server's part, for one connection."""

    hello_bytes = MAGIC_BYTES + 2 * 32 + TAG_BYTES + 1 + TAG_BYTES
    proof_bytes = TAG_BYTES

    def __init__(self, own: X25519PrivateKey, address: str, sealed: bool) -> None:
        self._own, self._address, self._sealed = own, address, sealed
        self.ciphers: Ciphers | None = None

    def whose(self, hello: bytes) -> bytes | None:
        """The public key that the client is to prove; None when it does not know ours."""
        magic, first = hello[:MAGIC_BYTES], hello[MAGIC_BYTES:]
        suite = SUITES.get(magic)
        if suite is None:
            return None
        self._noise = Responder(suite, self._own, magic + self._address.encode())
        try:
            public, wants = self._noise.begin(first)
        except Refusal:
            return None
        self._sealed = self._sealed or wants == SEALED
        return public

    def challenge(self) -> bytes:
        """The answer to a hello."""
        payload = SEALED if self._sealed else PLAIN
        challenge, self._sends, self._receives = self._noise.second(payload)
        return challenge

    def proven(self, proof: bytes) -> bool:
        """Whether the client has the key that it told, and has answered this very challenge."""
        try:
            self._receives.open(proof, bytearray())
        except Refusal:
            return False
        if self._sealed:
            self.ciphers = self._sends, self._receives
        return True


PREFERRED = _preferred()
