"""Handshake and ciphers of the bulk port against the Noise Protocol Framework."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from meshrl.common.weights.handshakes.noise import (
    AES_GCM,
    CHACHA_POLY,
    TAG_BYTES,
    CipherSuite,
    HandshakeViolation,
    NoiseCipher,
    NoiseInitiator,
    NoiseResponder,
)

# The test vectors of the cacophony library for the two protocols.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
INITIATOR = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
RESPONDER_PUBLIC = "31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"
PAYLOADS = [
    "4c756477696720766f6e204d69736573",
    "4d757272617920526f746862617264",
    "462e20412e20486179656b",
    "4361726c204d656e676572",
    "4a65616e2d426170746973746520536179",
    "457567656e2042f6686d20766f6e2042617765726b",
]
MESSAGES = {
    AES_GCM: [
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "4e417bc55c7a8166c993356c1be41ef67818a292426f301556c7f26b21d25ddb"
        "097153891a9a956cff47b83e63ad8d701c1342c209cff1ca5ecd43402762ac24"
        "9e3bd3a4c0a145fe07cb5dae28ea13a3",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "af2ccf9972e22afc67aeafcd25162f7f98c363b7762e3e4cb7d272e39f27a5",
        "66acfc92e3197de166809e6d4d5d003dcc819a84bc3522ca53c9d9",
        "71f89aa6533a6de70b0826864dd75f60806ee40170c16290189eb3",
        "4795a3423550c8bf00386bd496a3e2c76c10669d2a75ab8f79b5094c5412a25705",
        "aa0bb39097555c918e40be82abc2b909eb79d9eb87adb07e268fc37323a6cf904fd01fb391",
    ],
    CHACHA_POLY: [
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "718da798efbcd91528520204f904b9bd6c7413dccdc214d951e15253e39987f1"
        "8146e8cd0873654207148333479d4d16c289f0294b29960a72f48e0b7bba2e89"
        "083169825e59642148d492020664ccf7",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "5361e70b2ed446e6c9ec387d1d6b3b840f194e373979d241b203c4acafccf5",
        "050e9f3c8fac16b68dbce8f8c4bfbf6617c897f9ada4aa29aa19c8",
        "344233a6cabb7141d80f3da2fedc311d9646bbb0f505afe403a667",
        "62cdeeb172ad7ade7aa7d9e069da5790f12331bfa00177787a1d0810c67dc3b2b4",
        "029bead1b40992327044d409d9a1f3ad8f36c3c452775d557e18bbeb2e8dfcead32d514024",
    ],
}


def load_key(secret: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(secret))


def make_handshake(suite: CipherSuite) -> tuple[NoiseInitiator, NoiseResponder]:
    return (
        NoiseInitiator(
            suite,
            load_key(INITIATOR),
            bytes.fromhex(RESPONDER_PUBLIC),
            PROLOGUE,
            load_key(INITIATOR_EPHEMERAL),
        ),
        NoiseResponder(suite, load_key(RESPONDER), PROLOGUE, load_key(RESPONDER_EPHEMERAL)),
    )


def encrypt(cipher: NoiseCipher, content: bytes) -> bytes:
    buffer = bytearray(len(content) + TAG_BYTES)
    assert cipher.encrypt_into(content, buffer) == len(buffer)
    return bytes(buffer)


def decrypt(cipher: NoiseCipher, content: bytes) -> bytes:
    buffer = bytearray(max(0, len(content) - TAG_BYTES))
    assert cipher.decrypt_into(content, buffer) == len(buffer)
    return bytes(buffer)


@pytest.mark.parametrize("suite", [AES_GCM, CHACHA_POLY], ids=["aes", "chacha"])
def test_messages_match_the_framework_test_vectors(suite: CipherSuite) -> None:
    initiator, responder = make_handshake(suite)
    payloads = [bytes.fromhex(text) for text in PAYLOADS]
    expected = [bytes.fromhex(text) for text in MESSAGES[suite]]
    assert initiator.make_first_message(payloads[0]) == expected[0]
    public, payload = responder.read_first_message(expected[0])
    assert public == load_key(INITIATOR).public_key().public_bytes_raw()
    assert payload == payloads[0]
    message, responder_send, responder_receive = responder.make_second_message(payloads[1])
    assert message == expected[1]
    payload, send, receive = initiator.read_second_message(message)
    assert payload == payloads[1]
    for index in (2, 4):
        assert encrypt(send, payloads[index]) == expected[index]
        assert decrypt(responder_receive, expected[index]) == payloads[index]
        assert encrypt(responder_send, payloads[index + 1]) == expected[index + 1]
        assert decrypt(receive, expected[index + 1]) == payloads[index + 1]


@pytest.mark.parametrize("suite", [AES_GCM, CHACHA_POLY], ids=["aes", "chacha"])
def test_changed_replayed_and_skipped_messages_are_rejected(suite: CipherSuite) -> None:
    initiator, responder = make_handshake(suite)
    first = initiator.make_first_message(b"")
    for position in range(0, len(first), 7):
        changed = first[:position] + bytes([first[position] ^ 1]) + first[position + 1 :]
        with pytest.raises(HandshakeViolation):
            NoiseResponder(suite, load_key(RESPONDER), PROLOGUE).read_first_message(changed)
    with pytest.raises(HandshakeViolation):
        NoiseResponder(suite, load_key(RESPONDER), PROLOGUE + b"?").read_first_message(first)
    with pytest.raises(HandshakeViolation):
        NoiseResponder(suite, load_key(INITIATOR), PROLOGUE).read_first_message(first)
    responder.read_first_message(first)
    second, _, responder_receive = responder.make_second_message(b"")
    with pytest.raises(HandshakeViolation):
        make_handshake(suite)[0].read_second_message(second[:-1] + bytes([second[-1] ^ 1]))
    _, send, _ = initiator.read_second_message(second)
    messages = [encrypt(send, b"one"), encrypt(send, b"two"), encrypt(send, b"three")]
    assert decrypt(responder_receive, messages[0]) == b"one"
    with pytest.raises(HandshakeViolation):
        decrypt(responder_receive, messages[0])
    with pytest.raises(HandshakeViolation):
        decrypt(responder_receive, messages[2][:-1])


def test_key_with_zero_shared_secret_is_rejected() -> None:
    with pytest.raises(HandshakeViolation):
        NoiseInitiator(AES_GCM, load_key(INITIATOR), bytes(32), PROLOGUE).make_first_message(b"")
    _, responder = make_handshake(AES_GCM)
    with pytest.raises(HandshakeViolation):
        responder.read_first_message(bytes(96))


@pytest.mark.parametrize("suite", [AES_GCM, CHACHA_POLY], ids=["aes", "chacha"])
def test_both_ends_rekey_at_the_same_message(suite: CipherSuite) -> None:
    send, receive = (NoiseCipher(suite, bytes(32), rekey_after_messages=3) for _ in range(2))
    fixed_cipher = NoiseCipher(suite, bytes(32))
    for number in range(8):
        message = encrypt(send, b"the same")
        assert decrypt(receive, message) == b"the same"
        assert (message == encrypt(fixed_cipher, b"the same")) == (number < 3)
