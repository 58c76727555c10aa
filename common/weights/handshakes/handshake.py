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
    HandshakeViolation,
    NoiseCipher,
    NoiseInitiator,
    NoiseResponder,
)

CipherPair = tuple[NoiseCipher, NoiseCipher]  # to send with, to receive with

SUITES_BY_MAGIC = {b"MRA3": AES_GCM, b"MRC3": CHACHA_POLY}
_AES, _CHACHA = SUITES_BY_MAGIC
MAGIC_BYTES = 4
SEALED, PLAIN = b"\x01", b"\x00"


def _choose_suite() -> bytes:
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
        self,
        key_pair: X25519PrivateKey,
        server_key: bytes,
        address: str,
        sealed: bool,
        magic: bytes = b"",
    ) -> None:
        """`magic`: of a suite; the one this machine is fastest with if not given."""
        self._magic, self._sealed = magic or PREFERRED_SUITE, sealed
        prologue = self._magic + address.encode()
        self._noise = NoiseInitiator(SUITES_BY_MAGIC[self._magic], key_pair, server_key, prologue)
        self.ciphers: CipherPair | None = None  # of what follows the proof; None: it is not sealed

    def make_hello(self) -> bytes:
        """What is sent first."""
        return self._magic + self._noise.make_first_message(SEALED if self._sealed else PLAIN)

    def answer_challenge(self, challenge: bytes) -> bytes | None:
        """The TAG_BYTES that answer the server's challenge; None when it has another key, or will
        not seal what this end wants sealed.
        """
        try:
            answer, sends, receives = self._noise.read_second_message(challenge)
        except HandshakeViolation:
            return None
        if self._sealed and answer != SEALED:
            return None
        proof = bytearray(TAG_BYTES)
        sends.encrypt_into(b"", proof)
        if answer == SEALED:
            self.ciphers = sends, receives
        return bytes(proof)


class ServerHandshake:
    """The server's part, for one connection."""

    hello_bytes = MAGIC_BYTES + 2 * 32 + TAG_BYTES + 1 + TAG_BYTES
    proof_bytes = TAG_BYTES

    def __init__(self, key_pair: X25519PrivateKey, address: str, sealed: bool) -> None:
        self._key_pair, self._address, self._sealed = key_pair, address, sealed
        self.ciphers: CipherPair | None = None

    def read_client_key(self, hello: bytes) -> bytes | None:
        """The public key that the client is to prove; None when it does not know ours."""
        magic, first = hello[:MAGIC_BYTES], hello[MAGIC_BYTES:]
        suite = SUITES_BY_MAGIC.get(magic)
        if suite is None:
            return None
        self._noise = NoiseResponder(suite, self._key_pair, magic + self._address.encode())
        try:
            public, wants = self._noise.read_first_message(first)
        except HandshakeViolation:
            return None
        self._sealed = self._sealed or wants == SEALED
        return public

    def make_challenge(self) -> bytes:
        """The answer to a hello."""
        payload = SEALED if self._sealed else PLAIN
        challenge, self._send_cipher, self._receive_cipher = self._noise.make_second_message(
            payload
        )
        return challenge

    def verify_proof(self, proof: bytes) -> bool:
        """Whether the client has the key that it told, and has answered this very challenge."""
        try:
            self._receive_cipher.decrypt_into(proof, bytearray())
        except HandshakeViolation:
            return False
        if self._sealed:
            self.ciphers = self._send_cipher, self._receive_cipher
        return True


PREFERRED_SUITE = _choose_suite()
