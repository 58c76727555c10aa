"""What a person is given to reach a mesh: one line of text, with a key of their own in it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host import secret_files

TOKEN_PREFIX = "meshrl-token:"
FILE_FIX = f"Give a file of `meshrl token create`, or its text, which begins with {TOKEN_PREFIX}"
GATEWAY_PORT = 7199  # where nothing else is said
MAX_FILE_CHARS = 4096  # characters: a file that is larger is none of ours


@dataclass(frozen=True)
class AccessToken:
    """Where a mesh's gateway listens, the key that it answers with, and the token's secret key."""

    address: str
    gateway: str  # public key, Z85
    secret: str = field(repr=False)  # key, Z85

    @property
    def encoded(self) -> str:
        """The line."""
        return TOKEN_PREFIX + base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()


def parse_gateway_address(text: str, port: int, setting: str) -> str:
    """The address of NAME, NAME:PORT, [IPv6] or [IPv6]:PORT, as tickets have it; ConfigError, which
    names the `setting`.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ConfigError(
            f"{text!r} is no name or address of a host", where=setting, fix="Write NAME:PORT"
        )
    return f"tcp://{found[1]}:{found[2] or port}"


def read_token(token: str | Path) -> AccessToken:
    """The ticket in a text, or in the file that it names; ConfigError when it is none, or when a
    file of it can be read by others.
    """
    text = str(token).strip()
    where = ""
    if not text.startswith(TOKEN_PREFIX):
        where, text = (
            text,
            secret_files.read_secret(Path(text).expanduser(), "token", FILE_FIX, MAX_FILE_CHARS),
        )
    if not text.startswith(TOKEN_PREFIX):
        raise ConfigError(
            f"what is there is no token, which begins with {TOKEN_PREFIX}",
            where=where,
            fix="Copy all of the line that `meshrl token create` printed",
        )
    try:
        held = json.loads(base64.urlsafe_b64decode(text.removeprefix(TOKEN_PREFIX).encode()))
        found = AccessToken(**held)
        if not all(isinstance(value, str) for value in held.values()):
            raise ValueError("its parts are no texts")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the token cannot be read: {error}",
            where=where,
            fix="Copy it again, all of the line that `meshrl token create` printed",
        ) from None
    return found
