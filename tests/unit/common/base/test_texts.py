"""Displayed texts, without control characters and secrets."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from typing import cast
from urllib.parse import quote

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import REDIS_ENV, SECRET_BYTES, derive_key
from meshrl.common.base.host.terminal import (
    EscapingStream,
    escape_controls,
    escaped_output,
    unwrap_stream,
)
from meshrl.common.base.urls import Url
from meshrl.common.state.redis import embedded_server

ATTACKS = (
    "\x1b[2J\x1b[H",  # clear the screen
    "\x1b]0;title\x07\x1b]8;;http://x\x07link\x1b]8;;\x07",  # a title and a link
    "\x1b]52;c;aGk=\x07",  # the clipboard
    "\x9b31m\x9d0;t\x9c\x90q\x9c",  # the same by C1 codes
    "a\rb\x08\x7f\x00\x0b\x0c",
    "\u202e drow \u202c \u2066a\u2069 \u200f \u061c",  # bidirectional controls
    "\u2028\u2029\ufff9\U000e0041\ud800",
)
# Redacted forms of a URL: of a Redis, and of a remote directory.
REDIS_FORMS = {
    "redis://127.0.0.1:6379/0": ("redis://127.0.0.1:6379/0",) * 2,
    "unix:///run/a@b/redis.sock?db=1": (
        "unix:///run/a@b/redis.sock?db=1",
        "unix:///run/a@b/redis.sock",
    ),
    "rediss://me:s3:cr@et@host/0?db=1": ("rediss://me:***@host/0?db=1", "rediss://host/0"),
    "redis://me:s3/cret@host:6379/0": ("redis://***@host:6379/0",) * 2,
    "redis://me:12/s3cret@host/0": ("redis://***@host/0",) * 2,
    "redis://host:s3cret/0": ("redis://***",) * 2,
    "redis://host/0?p%61ssword=s3cret&db=2": (
        "redis://host/0?p%61ssword=***&db=2",
        "redis://host/0",
    ),
    "redis://host/0?db=1;password=s3cret": ("redis://host/0?db=***", "redis://host/0"),
    "redis://host/0?password=s3@cret": ("redis://host/0?password=***", "redis://host/0"),
    "redis://me:12?x=s3cret@host": ("redis://***@host",) * 2,
    "redis://host/0#s3cret": ("redis://host/0#***", "redis://host/0"),
    "me:s3cret@host:6379": ("me:***@host:6379", "host:6379"),
    "me:s3/cret@host:6379": ("***@host:6379",) * 2,
    "rediss://me:pw@[::1]:6379/0": ("rediss://me:***@[::1]:6379/0", "rediss://[::1]:6379/0"),
}
DIRECTORY_FORMS = {
    "s3://bucket/path@v1/a#b": "s3://bucket/path@v1/a#b",
    "s3://key:s3/cret@bucket/path": "s3://***@bucket/path",
    "https://t0ken@host/path?sig=s3cret#s3cret": "https://host/path",
    "simplecache::s3://me:s3cret@bucket/x": "simplecache::s3://***",
    "file:///my folder/x": "file:///my folder/x",
}
SPECIAL_CHARACTERS = "/#?@:[]%&=+; \t\u2100\\'\"é"


def is_plain(text: str) -> bool:
    """Return True if a terminal displays the text without interpreting it."""
    return all(
        character in "\n\t" or unicodedata.category(character) not in CONTROLS for character in text
    )


CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_control_characters_are_escaped() -> None:
    assert escape_controls("\x1b[31m\x9b\u202e\x7f") == r"\u001b[31m\u009b\u202e\u007f"
    for attack in ATTACKS:
        assert is_plain(escape_controls(attack)) and escape_controls(
            escape_controls(attack)
        ) == escape_controls(attack)
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)):
        assert is_plain(escape_controls(chr(code))), hex(code)


def test_other_text_is_unchanged() -> None:
    for text in ("", "a\tb\n", "naïve 漢字 🙂 👩\u200d👩", "عربي עברית", "\\u001b"):
        assert escape_controls(text) == text
    assert escape_controls("one\r\ntwo\r\n") == "one\ntwo\n"


def test_escaped_json_decodes_to_the_same_value() -> None:
    for attack in ATTACKS:
        for ascii_only in (True, False):
            printed = escape_controls(json.dumps({"text": attack}, ensure_ascii=ascii_only))
            assert is_plain(printed) and json.loads(printed) == {"text": attack}


def test_streams_are_escaped_only_within_the_context() -> None:
    out, error, before = io.StringIO(), io.StringIO(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = out, error
    try:
        with escaped_output(), escaped_output():
            print("\x1b[31m", file=sys.stderr)
            sys.stdout.writelines(["\x1b[32m", "b"])
            print("\x1b[1m", file=unwrap_stream(sys.stdout))
        assert (sys.stdout, sys.stderr) == (out, error)
    finally:
        sys.stdout, sys.stderr = before
    assert (error.getvalue(), out.getvalue()) == ("\\u001b[31m\n", "\\u001b[32mb\x1b[1m\n")
    assert cast(io.StringIO, EscapingStream(out)).getvalue() == out.getvalue()


def test_urls_are_redacted() -> None:
    for url, (redis, public) in REDIS_FORMS.items():
        assert (Url.parse(url).redacted_redis_url, Url.parse(url).public_url) == (redis, public), (
            url
        )
    for url, public in DIRECTORY_FORMS.items():
        assert Url.parse(url).public_url == public


def test_passwords_with_special_characters_are_redacted() -> None:
    for first in SPECIAL_CHARACTERS:
        for second in SPECIAL_CHARACTERS:
            password = f"hunter{first}and{second}fox"
            for url in (
                f"redis://me:{password}@host:6379/0",
                f"rediss://:{quote(password, safe='')}@host/0?ssl_ca_certs=/a.pem",
                f"unix:///run/r.sock?db=1&password={quote(password, safe='')}",
                f"redis://host/0?username=me&password={quote(password, safe='')}",
                f"s3://key:{password}@bucket/path",
            ):
                parsed_url = Url.parse(url)
                outputs = [
                    parsed_url.redacted_redis_url,
                    parsed_url.public_url,
                    parsed_url.redact(f"cannot open {url}, {password!r}"),
                ]
                outputs += [
                    repr(parsed_url),
                    parsed_url.redact(quote(password)),
                    parsed_url.redact(f"{password}."),
                ]
                assert not any(word in text for text in outputs for word in ("hunter", "fox")), url


def test_ambiguous_redis_url_is_rejected_with_the_escape_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for character in "/#?[":
        monkeypatch.setenv(REDIS_ENV, f"redis://me:hunter{character}fox@host:6379/0")
        with pytest.raises(ConfigError, match=r"at redis://\*\*\*@host:6379/0.*%2F") as raised:
            embedded_server.read_configured_url()
        assert "hunter" not in str(raised.value) and "fox" not in str(raised.value)
        escaped = f"redis://me:hunter{quote(character, safe='')}fox@host:6379/0"
        monkeypatch.setenv(REDIS_ENV, escaped)
        assert embedded_server.read_configured_url() == escaped


def test_derived_keys_differ() -> None:
    secrets = ["00" * SECRET_BYTES, "01" * SECRET_BYTES]
    found = {derive_key(secret, purpose) for secret in secrets for purpose in ("bulk", "redis")}
    assert len(found) == 4
    assert all(len(key) == 32 for key in found)
    assert derive_key(secrets[0], "bulk") == derive_key(secrets[0], "bulk")
