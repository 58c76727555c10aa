"""Noise_IK_25519_AESGCM_SHA256 and Noise_IK_25519_ChaChaPoly_SHA256, of the Noise Protocol
Framework, revision 34 (noiseprotocol.org/noise.html): two ends with a static key pair each prove
these to each other, and get a cipher for either direction that nobody has who learns the static
keys later.

    <- s                    the initiator knows the responder's key
    -> e, es, s, ss         and tells its own, encrypted
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
# Messages under one key, after which both ends make the next from it (REKEY, section 4.2). With
# frames of 256 KiB that is 256 GiB, where AES-GCM's bound for telling it from noise is 2^-60.
REKEY_AFTER = 1 << 20
_LAST = (1 << 64) - 1  # the nonce that REKEY takes

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class CipherSuite:
    """A cipher, as the framework names and uses it."""

    name: bytes
    aead: Callable[[bytes], AESGCM | ChaCha20Poly1305]
    nonce: Callable[[int], bytes]


AES_GCM = CipherSuite(
    b"Noise_IK_25519_AESGCM_SHA256", AESGCM, lambda n: bytes(4) + n.to_bytes(8, "big")
)
CHACHA_POLY = CipherSuite(
    b"Noise_IK_25519_ChaChaPoly_SHA256",
    ChaCha20Poly1305,
    lambda n: bytes(4) + n.to_bytes(8, "little"),
)


class Refusal(ConnectionError):
    """Bytes that the other end of a handshake, or of a connection, cannot have sent."""


class Cipher:
    """Encrypts, or decrypts, the messages of one direction, each under the next nonce."""

    def __init__(self, suite: CipherSuite, key: bytes, rekey_after: int = REKEY_AFTER) -> None:
        self._suite, self._aead, self._rekey_after = suite, suite.aead(key), rekey_after
        self._sent = 0

    def seal(self, content: Buffer, room: Buffer, also: bytes = b"") -> int:
        """Encrypts into `room`, which is TAG_BYTES longer; how many bytes."""
        nonce = self._nonce()
        return self._aead.encrypt_into(nonce, content, also, room)

    def open(self, sealed: Buffer, room: Buffer, also: bytes = b"") -> int:
        """Decrypts into `room`, which is TAG_BYTES shorter; how many bytes. Refusal."""
        nonce = self._nonce()
        try:
            return self._aead.decrypt_into(nonce, sealed, also, room)
        except InvalidTag:
            raise Refusal("bytes that were not sealed with this key, or in another order") from None

    def _nonce(self) -> bytes:
        if self._sent and self._sent % self._rekey_after == 0:
            sealed = self._aead.encrypt(self._suite.nonce(_LAST), bytes(KEY_BYTES), b"")
            self._aead = self._suite.aead(sealed[:KEY_BYTES])
        self._sent += 1
        return self._suite.nonce(self._sent - 1)


class _Handshake:
    """The state that both ends share; `static` is this end's pair."""

    def __init__(
        self,
        suite: CipherSuite,
        static: X25519PrivateKey,
        responder: bytes,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        """`responder`: the public key of that end. `prologue`: what both must have heard alike.
        `ephemeral`: for tests alone.
        """
        name = suite.name
        self._hash = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._chain = self._hash
        self._suite, self._static, self._responder = suite, static, responder
        self._cipher: Cipher | None = None
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._mix_hash(prologue)
        self._mix_hash(responder)

    def _mix_hash(self, content: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + content).digest()

    def _mix_key(self, ours: X25519PrivateKey, theirs: bytes) -> None:
        try:
            shared = ours.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:  # a point that makes every secret zero
            raise Refusal(str(error)) from None
        self._chain, key = _derived(self._chain, shared)
        self._cipher = Cipher(self._suite, key)

    def _seal(self, content: bytes) -> bytes:
        assert self._cipher is not None
        room = bytearray(len(content) + TAG_BYTES)
        self._cipher.seal(content, room, self._hash)
        self._mix_hash(bytes(room))
        return bytes(room)

    def _open(self, sealed: bytes) -> bytes:
        assert self._cipher is not None
        room = bytearray(len(sealed) - TAG_BYTES)
        self._cipher.open(sealed, room, self._hash)
        self._mix_hash(sealed)
        return bytes(room)

    def _split(self) -> tuple[Cipher, Cipher]:
        """Of what the initiator sends, and of what it receives."""
        first, second = _derived(self._chain, b"")
        return Cipher(self._suite, first), Cipher(self._suite, second)


class Initiator(_Handshake):
    """The end that knows whom it asks."""

    def first(self, payload: bytes) -> bytes:
        """The message that begins it, 96 bytes longer than the payload. Who records it can make the
        responder answer again, and no more. Refusal: the responder's key is none.
        """
        own = _public(self._ephemeral)
        self._mix_hash(own)
        self._mix_key(self._ephemeral, self._responder)
        static = self._seal(_public(self._static))
        self._mix_key(self._static, self._responder)
        return own + static + self._seal(payload)

    def finish(self, second: bytes) -> tuple[bytes, Cipher, Cipher]:
        """The payload of the responder's message, and what to send and to receive with. Refusal:
        it does not have that key.
        """
        theirs, sealed = second[:KEY_BYTES], second[KEY_BYTES:]
        self._mix_hash(theirs)
        self._mix_key(self._ephemeral, theirs)
        self._mix_key(self._static, theirs)
        return (self._open(sealed), *self._split())


class Responder(_Handshake):
    """The end that is asked."""

    def __init__(
        self,
        suite: CipherSuite,
        static: X25519PrivateKey,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        super().__init__(suite, static, _public(static), prologue, ephemeral)

    def begin(self, first: bytes) -> tuple[bytes, bytes]:
        """The initiator's public key, and the payload of its message. Refusal: it does not know
        ours, or has no pair to the key it tells.
        """
        self._theirs, static = first[:KEY_BYTES], first[KEY_BYTES : 2 * KEY_BYTES + TAG_BYTES]
        self._mix_hash(self._theirs)
        self._mix_key(self._static, self._theirs)
        self._initiator = self._open(static)
        self._mix_key(self._static, self._initiator)
        return self._initiator, self._open(first[2 * KEY_BYTES + TAG_BYTES :])

    def second(self, payload: bytes) -> tuple[bytes, Cipher, Cipher]:
        """The answer, 48 bytes longer than the payload, and what to send and to receive with. The
        initiator has proved its key once it has sealed a message with the other.
        """
        own = _public(self._ephemeral)
        self._mix_hash(own)
        self._mix_key(self._ephemeral, self._theirs)
        self._mix_key(self._ephemeral, self._initiator)
        message = own + self._seal(payload)
        receive, send = self._split()
        return message, send, receive


def _public(pair: X25519PrivateKey) -> bytes:
    return pair.public_key().public_bytes_raw()


def _derived(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """HKDF of the framework (section 4.3), two outputs."""
    key = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(key, b"\x01", "sha256")
    return first, hmac.digest(key, first + b"\x02", "sha256")
