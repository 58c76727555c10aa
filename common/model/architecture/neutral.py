"""Keys of a config.json that change nothing: by their name, or by a value that is off."""

from __future__ import annotations

import re
from typing import Any

_MEANT = frozenset({"is_causal", "use_rope"})  # keys of which True is what every decoder does
_FACTOR = re.compile(r"multiplier|scal(e|ing)$|factor")  # 1 leaves what it multiplies as it is
# Ids of tokens; dropout, which is for pre-training; what a tool notes for itself.
_BY_NAME = re.compile(r"_token_ids?$|dropout|_pdrop$|layerdrop|^_|^unsloth")


def is_neutral(key: str, value: Any) -> bool:
    """True if a model computes the same with `key = value` as without the key."""
    empty = value is None or (isinstance(value, str | list | dict) and not value)
    if empty or _BY_NAME.search(key):
        return True
    if not isinstance(value, bool | int | float):
        return False
    if key in _MEANT:
        return value == 1
    if value == 1 and not isinstance(value, bool):
        return _FACTOR.search(key) is not None
    return value == 0
