"""Handshake of a connection to a bulk port: Noise's IK with the processes' bulk key pairs.

The bulk keys are registered beside those for CURVE.

    client -> server   magic, e, es, s, ss, whether the client requires encryption
    server -> client   e, ee, se, whether the connection is encrypted
    client -> server   an empty message, which excludes a replay; its first request

The client knows the server's key from its address. The server looks up the client's key before it
answers. The prologue is the magic and the address that the client connects to. The connection is
encrypted if either end requires it; otherwise it is as safe as the network.
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
    """Return the magic of the fastest cipher suite of this machine.

    AES-GCM takes 0.11 s of CPU per GB if the processor has instructions for it, a third of
    ChaCha20-Poly1305; without them it is many times slower.
    """
    found = Path("/proc/cpuinfo")
    cpu_flags = (
        found.read_text().lower().replace("\n", " ").split(" ") if found.exists() else ["aes"]
    )
    return _AES if "aes" in cpu_flags else _CHACHA


class ClientHandshake:
    """Client side of the handshake."""

    challenge_bytes = 32 + 1 + TAG_BYTES

    def __init__(
        self,
        key_pair: X25519PrivateKey,
        server_key: bytes,
        address: str,
        sealed: bool,
        magic: bytes = b"",
    ) -> None:
        """Create the client side.

        Args:
            server_key: Public key of the server.
            address: Address that the client connects to.
            magic: Magic of a suite; the machine's fastest one by default.
        """
        self._magic, self._sealed = magic or PREFERRED_SUITE, sealed
        prologue = self._magic + address.encode()
        self._noise = NoiseInitiator(SUITES_BY_MAGIC[self._magic], key_pair, server_key, prologue)
        self.ciphers: CipherPair | None = (
            None  # after the proof; None: the connection is not encrypted
        )

    def make_hello(self) -> bytes:
        """Return the first message."""
        return self._magic + self._noise.make_first_message(SEALED if self._sealed else PLAIN)

    def answer_challenge(self, challenge: bytes) -> bytes | None:
        """Return the proof that answers the server's challenge, TAG_BYTES long.

        None if the server has another key, or does not accept required encryption.
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
    """Server side of the handshake of one connection."""

    hello_bytes = MAGIC_BYTES + 2 * 32 + TAG_BYTES + 1 + TAG_BYTES
    proof_bytes = TAG_BYTES

    def __init__(self, key_pair: X25519PrivateKey, address: str, sealed: bool) -> None:
        self._key_pair, self._address, self._sealed = key_pair, address, sealed
        self.ciphers: CipherPair | None = None

    def read_client_key(self, hello: bytes) -> bytes | None:
        """Return the public key that the client has to prove; None if it does not know the server's
        key.
        """
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
        """Return the response to a hello."""
        payload = SEALED if self._sealed else PLAIN
        challenge, self._send_cipher, self._receive_cipher = self._noise.make_second_message(
            payload
        )
        return challenge

    def verify_proof(self, proof: bytes) -> bool:
        """Return True if the client has its key and has answered this challenge."""
        try:
            self._receive_cipher.decrypt_into(proof, bytearray())
        except HandshakeViolation:
            return False
        if self._sealed:
            self.ciphers = self._send_cipher, self._receive_cipher
        return True


PREFERRED_SUITE = _choose_suite()
