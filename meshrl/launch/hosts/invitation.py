"""The token that a host joins with, wherever it was put: a secret, so never on a command line."""

from __future__ import annotations

import os
import sys

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.base.urls import Url
from meshrl.common.mesh.access import ticket
from meshrl.common.mesh.access.ticket import BEGINS, LONGEST, Ticket

JOIN_ENV = "MESHRL_JOIN"  # the text of a token, or where it is
LOCAL = ("localhost", "127.0.0.1", "::1")
# Of fsspec's, those by which nobody on the way reads what comes.
PRIVATE = ("abfs", "abfss", "adl", "az", "file", "gcs", "gs", "https", "s3", "s3a", "sftp", "ssh")


def found(given: str | None) -> Ticket:
    """The ticket in a file, at a URL, in the standard input (`-`), or in $MESHRL_JOIN; ConfigError
    says what is wrong with it, NotFound that there is none.
    """
    if given is not None and given.strip().startswith(BEGINS):
        raise ConfigError(
            "a token on a command line is seen by everybody on this host, and in its history",
            fix=f"Put it into a file (chmod 600), or ${JOIN_ENV}, or pipe it to `meshrl join -`",
        )
    told = given or os.environ.get(JOIN_ENV, "")
    if not told:
        raise NotFound(
            "no token to join with was given",
            fix="Copy mesh/join.token of the head here, or make one there with `meshrl token "
            "create --host`; then `meshrl join FILE`",
        )
    if told == "-":
        return ticket.read(_a_token(sys.stdin.read(LONGEST), "the standard input"))
    if "://" in told:
        return ticket.read(_a_token(_fetched(told), told))
    return ticket.read(told)


def _fetched(url: str) -> str:
    import fsspec

    at = Url.of(url)
    near, scheme = at.scheme == "http" and at.hostname in LOCAL, url.partition("://")[0]
    if scheme not in PRIVATE and not near:  # nor is a chain of fsspec's, as zip://*::http://HOST
        raise ConfigError(
            f"a token is a secret, and {scheme}:// shows it to the network, or may",
            fix=f"https, or one of {', '.join(PRIVATE)}",
        )
    try:
        files, path = fsspec.core.url_to_fs(url)  # `fsspec.open` takes a ? for a pattern
        with files.open(path, "rb") as file:
            content: bytes = file.read(LONGEST)
            return content.decode()
    except (OSError, ValueError, ImportError, UnicodeDecodeError) as error:
        told = Url.of(url)
        said = told.hide(str(error))
        raise ConfigError(f"no token can be read there: {said}", where=told.place) from None


def _a_token(text: str, where: str) -> str:
    if not text.strip().startswith(BEGINS):
        raise ConfigError(
            f"what is there is no token, which begins with {BEGINS}", where=Url.of(where).place
        )
    return text
