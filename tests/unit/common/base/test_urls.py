"""URLs are shown without their secrets, whatever characters these have."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import REDIS_ENV
from meshrl.common.base.urls import Url
from meshrl.common.state.redis import embedded

# What a URL is shown as: of a Redis, and of a place that files are written to.
SHOWN = {
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
PLACES = {
    "s3://bucket/path@v1/a#b": "s3://bucket/path@v1/a#b",
    "s3://key:s3/cret@bucket/path": "s3://***@bucket/path",
    "https://t0ken@host/path?sig=s3cret#s3cret": "https://host/path",
    "simplecache::s3://me:s3cret@bucket/x": "simplecache::s3://***",
    "file:///my folder/x": "file:///my folder/x",
}
AWKWARD = "/#?@:[]%&=+; \t\u2100\\'\"é"


def test_urls_are_shown_without_their_secrets() -> None:
    for url, (redis, place) in SHOWN.items():
        assert (Url.of(url).redis, Url.of(url).place) == (redis, place), url
    for url, place in PLACES.items():
        assert Url.of(url).place == place


def test_no_character_of_a_password_makes_it_visible() -> None:
    for first in AWKWARD:
        for second in AWKWARD:
            password = f"hunter{first}and{second}fox"
            for url in (
                f"redis://me:{password}@host:6379/0",
                f"rediss://:{quote(password, safe='')}@host/0?ssl_ca_certs=/a.pem",
                f"unix:///run/r.sock?db=1&password={quote(password, safe='')}",
                f"redis://host/0?username=me&password={quote(password, safe='')}",
                f"s3://key:{password}@bucket/path",
            ):
                told = Url.of(url)
                seen = [told.redis, told.place, told.hide(f"cannot open {url}, {password!r}")]
                seen += [repr(told), told.hide(quote(password)), told.hide(f"{password}.")]
                assert not any(word in text for text in seen for word in ("hunter", "fox")), url


def test_an_ambiguous_url_of_redis_is_refused_with_what_to_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mark in "/#?[":
        monkeypatch.setenv(REDIS_ENV, f"redis://me:hunter{mark}fox@host:6379/0")
        with pytest.raises(ConfigError, match=r"at redis://\*\*\*@host:6379/0.*%2F") as no:
            embedded.configured_url()
        assert "hunter" not in str(no.value) and "fox" not in str(no.value)
        escaped = f"redis://me:hunter{quote(mark, safe='')}fox@host:6379/0"
        monkeypatch.setenv(REDIS_ENV, escaped)
        assert embedded.configured_url() == escaped
