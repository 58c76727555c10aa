"""Checks that trackers will accept a run: Weights & Biases needs a key, unless it is offline."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # by version of the package
WANDB_KEY_CHARS = 40  # at least, without the prefix of a server of one's own
LOGIN_FIX = (
    "Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline and send the run later with "
    "`wandb sync`"
)


def explain_missing_wandb_login() -> str:
    """Return why wandb would reject the run; an empty text if it has a key or needs none.

    The key is searched where wandb searches it: the environment, and `.netrc`.
    """
    mode = os.environ.get("WANDB_MODE") or _read_setting("mode") or "online"
    if mode not in ("online", "shared") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    if key := os.environ.get("WANDB_API_KEY", ""):
        is_token = key.count(".") == 2  # a JSON web token
        count = len(key.partition("-")[2] or key)
        if is_token or count >= WANDB_KEY_CHARS:
            return ""
        return f"WANDB_API_KEY has {count} characters, and keys have {WANDB_KEY_CHARS} or more"
    url = os.environ.get("WANDB_BASE_URL") or _read_setting("base_url")
    hosts = (urlsplit(url).hostname or url,) if url else WANDB_HOSTS
    has_key = any(map(_has_netrc_entry, hosts))
    return "" if has_key else f"Weights & Biases has no key for {hosts[0]} here"


def _has_netrc_entry(host: str) -> bool:
    own = os.environ.get("NETRC")
    names = [Path(own)] if own else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in names:
        try:
            if path.is_file() and netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, UnicodeDecodeError, OSError):
            continue
    return False


def _read_setting(key: str) -> str:
    """Return a setting that `wandb offline` or `wandb login --host` wrote; empty if there is none.

    The settings of the working directory have precedence over the user's.
    """
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config/wandb")
    here = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([user / "settings", here / "settings"])
    except (configparser.Error, UnicodeDecodeError):
        return ""
    return parser.get("default", key, fallback="")
