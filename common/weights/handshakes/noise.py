"""Noise_IK_25519_AESGCM_SHA256 and Noise_IK_25519_ChaChaPoly_SHA256.

They follow the Noise Protocol Framework, revision 34 (noiseprotocol.org/noise.html). Two ends with
a static key pair each authenticate each other. Each direction gets a cipher that stays secret even
if the static keys leak later.

    <- s                    the initiator knows the responder's key
    -> e, es, s, ss         and sends its own, encrypted
    <- e, ee, se
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

KEY_BYTES = 32
TAG_BYTES = 16
# Messages under one key, after which both ends derive the next one (REKEY, section 4.2). With
# frames of 256 KiB that is 256 GiB, where the distinguishing bound of AES-GCM is 2^-60.
REKEY_AFTER_MESSAGES = 1 << 20
_REKEY_NONCE = (1 << 64) - 1  # the nonce of REKEY

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class CipherSuite:
    """Cipher with its name and nonce encoding in the framework."""

    name: bytes
    make_aead: Callable[[bytes], AESGCM | ChaCha20Poly1305]
    encode_nonce: Callable[[int], bytes]


AES_GCM = CipherSuite(
    b"Noise_IK_25519_AESGCM_SHA256", AESGCM, lambda n: bytes(4) + n.to_bytes(8, "big")
)
CHACHA_POLY = CipherSuite(
    b"Noise_IK_25519_ChaChaPoly_SHA256",
    ChaCha20Poly1305,
    lambda n: bytes(4) + n.to_bytes(8, "little"),
)


class HandshakeViolation(ConnectionError):
    """Bytes that the peer of a handshake or connection cannot have sent."""


class NoiseCipher:
    """Cipher of one direction; each message uses the next nonce."""

    def __init__(
        self, suite: CipherSuite, key: bytes, rekey_after_messages: int = REKEY_AFTER_MESSAGES
    ) -> None:
        self._suite, self._aead, self._rekey_after_messages = (
            suite,
            suite.make_aead(key),
            rekey_after_messages,
        )
        self._message_count = 0

    def encrypt_into(self, content: Buffer, output: Buffer, associated_data: bytes = b"") -> int:
        """Encrypt into `output`, which is TAG_BYTES longer; return its size."""
        nonce = self._next_nonce()
        return self._aead.encrypt_into(nonce, content, associated_data, output)

    def decrypt_into(self, sealed: Buffer, output: Buffer, associated_data: bytes = b"") -> int:
        """Decrypt into `output`, which is TAG_BYTES shorter; return its size.
        HandshakeViolation.
        """
        nonce = self._next_nonce()
        try:
            return self._aead.decrypt_into(nonce, sealed, associated_data, output)
        except InvalidTag:
            raise HandshakeViolation(
                "the bytes are not sealed with this key, or arrived in another order"
            ) from None

    def _next_nonce(self) -> bytes:
        if self._message_count and self._message_count % self._rekey_after_messages == 0:
            sealed = self._aead.encrypt(
                self._suite.encode_nonce(_REKEY_NONCE), bytes(KEY_BYTES), b""
            )
            self._aead = self._suite.make_aead(sealed[:KEY_BYTES])
        self._message_count += 1
        return self._suite.encode_nonce(self._message_count - 1)


class _NoiseHandshake:
    """State of either end of a handshake; `static_pair` is its own key pair."""

    def __init__(
        self,
        suite: CipherSuite,
        static_pair: X25519PrivateKey,
        responder_key: bytes,
        prologue: bytes,
        ephemeral_pair: X25519PrivateKey | None = None,
    ) -> None:
        """Create the state.

        Args:
            responder_key: Public key of the responder.
            prologue: Data that both ends must agree on.
            ephemeral_pair: For tests only.
        """
        name = suite.name
        self._hash = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._chaining_key = self._hash
        self._suite, self._static_pair, self._responder_key = suite, static_pair, responder_key
        self._cipher: NoiseCipher | None = None
        self._ephemeral_pair = ephemeral_pair or X25519PrivateKey.generate()
        self._mix_hash(prologue)
        self._mix_hash(responder_key)

    def _mix_hash(self, content: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + content).digest()

    def _mix_key(self, our_pair: X25519PrivateKey, their_key: bytes) -> None:
        try:
            shared = our_pair.exchange(X25519PublicKey.from_public_bytes(their_key))
        except ValueError as error:  # a point that makes every secret zero
            raise HandshakeViolation(str(error)) from None
        self._chaining_key, key = _derive_keys(self._chaining_key, shared)
        self._cipher = NoiseCipher(self._suite, key)

    def _encrypt_and_hash(self, content: bytes) -> bytes:
        assert self._cipher is not None
        room = bytearray(len(content) + TAG_BYTES)
        self._cipher.encrypt_into(content, room, self._hash)
        self._mix_hash(bytes(room))
        return bytes(room)

    def _decrypt_and_hash(self, sealed: bytes) -> bytes:
        assert self._cipher is not None
        room = bytearray(len(sealed) - TAG_BYTES)
        self._cipher.decrypt_into(sealed, room, self._hash)
        self._mix_hash(sealed)
        return bytes(room)

    def _split_ciphers(self) -> tuple[NoiseCipher, NoiseCipher]:
        """Return the ciphers of the initiator's and the responder's messages."""
        first, second = _derive_keys(self._chaining_key, b"")
        return NoiseCipher(self._suite, first), NoiseCipher(self._suite, second)


class NoiseInitiator(_NoiseHandshake):
    """Initiator, which knows the responder's key."""

    def make_first_message(self, payload: bytes) -> bytes:
        """Return the first message, 96 bytes longer than the payload.

        A replay makes the responder answer again, and nothing else. HandshakeViolation: the
        responder's key is invalid.
        """
        own = _public_bytes(self._ephemeral_pair)
        self._mix_hash(own)
        self._mix_key(self._ephemeral_pair, self._responder_key)
        static = self._encrypt_and_hash(_public_bytes(self._static_pair))
        self._mix_key(self._static_pair, self._responder_key)
        return own + static + self._encrypt_and_hash(payload)

    def read_second_message(self, message: bytes) -> tuple[bytes, NoiseCipher, NoiseCipher]:
        """Return the payload of the responder's message, and the ciphers to send and to receive
        with.

        HandshakeViolation: the responder does not have that key.
        """
        theirs, sealed = message[:KEY_BYTES], message[KEY_BYTES:]
        self._mix_hash(theirs)
        self._mix_key(self._ephemeral_pair, theirs)
        self._mix_key(self._static_pair, theirs)
        return (self._decrypt_and_hash(sealed), *self._split_ciphers())


class NoiseResponder(_NoiseHandshake):
    """Responder of a handshake."""

    def __init__(
        self,
        suite: CipherSuite,
        static_pair: X25519PrivateKey,
        prologue: bytes,
        ephemeral_pair: X25519PrivateKey | None = None,
    ) -> None:
        super().__init__(suite, static_pair, _public_bytes(static_pair), prologue, ephemeral_pair)

    def read_first_message(self, message: bytes) -> tuple[bytes, bytes]:
        """Return the initiator's public key, and the payload of its message.

        HandshakeViolation: the initiator does not know this end's key, or lacks the key pair it
        claims.
        """
        self._initiator_ephemeral, static = (
            message[:KEY_BYTES],
            message[KEY_BYTES : 2 * KEY_BYTES + TAG_BYTES],
        )
        self._mix_hash(self._initiator_ephemeral)
        self._mix_key(self._static_pair, self._initiator_ephemeral)
        self._initiator_key = self._decrypt_and_hash(static)
        self._mix_key(self._static_pair, self._initiator_key)
        return self._initiator_key, self._decrypt_and_hash(message[2 * KEY_BYTES + TAG_BYTES :])

    def make_second_message(self, payload: bytes) -> tuple[bytes, NoiseCipher, NoiseCipher]:
        """Return the response, 48 bytes longer than the payload, and the ciphers to send and
        receive with.

        The initiator has proved its key once it has encrypted a message with its cipher.
        """
        own = _public_bytes(self._ephemeral_pair)
        self._mix_hash(own)
        self._mix_key(self._ephemeral_pair, self._initiator_ephemeral)
        self._mix_key(self._ephemeral_pair, self._initiator_key)
        message = own + self._encrypt_and_hash(payload)
        receive, send = self._split_ciphers()
        return message, send, receive


def _public_bytes(pair: X25519PrivateKey) -> bytes:
    return pair.public_key().public_bytes_raw()


def _derive_keys(chaining_key: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Derive two outputs with the framework's HKDF (section 4.3)."""
    key = hmac.digest(chaining_key, secret, "sha256")
    first = hmac.digest(key, b"\x01", "sha256")
    return first, hmac.digest(key, first + b"\x02", "sha256")
