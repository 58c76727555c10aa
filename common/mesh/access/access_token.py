"""Access token with which a person reaches a mesh: one line of text that contains a secret key."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host import secret_files

TOKEN_PREFIX = "meshrl-token:"
FILE_FIX = f"Give a file from `meshrl token create`, or its text, which starts with {TOKEN_PREFIX}"
GATEWAY_PORT = 7199  # default
MAX_FILE_CHARS = 4096  # a larger file is no token file


@dataclass(frozen=True)
class AccessToken:
    """Address and public key of a mesh's gateway, and the token's secret key."""

    address: str
    gateway: str  # public key, Z85
    secret: str = field(repr=False)  # key, Z85

    @property
    def encoded(self) -> str:
        """Token as one line of text."""
        return TOKEN_PREFIX + base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()


def parse_gateway_address(text: str, port: int, setting: str) -> str:
    """Parse NAME, NAME:PORT, [IPv6] or [IPv6]:PORT to the address in access tokens.

    Raises ConfigError that names the `setting`.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ConfigError(
            f"{text!r} is not a host name or address", where=setting, fix="Write NAME:PORT"
        )
    return f"tcp://{found[1]}:{found[2] or port}"


def read_token(token: str | Path) -> AccessToken:
    """Read the access token in a text, or in the file that the text names.

    Raises ConfigError if it is invalid, or if other users can read the file.
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
            f"the content is not a token; a token starts with {TOKEN_PREFIX}",
            where=where,
            fix="Copy the whole line that `meshrl token create` printed",
        )
    try:
        fields = json.loads(base64.urlsafe_b64decode(text.removeprefix(TOKEN_PREFIX).encode()))
        found = AccessToken(**fields)
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("its parts are not text")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the token cannot be read: {error}",
            where=where,
            fix="Copy the whole line that `meshrl token create` printed again",
        ) from None
    return found
