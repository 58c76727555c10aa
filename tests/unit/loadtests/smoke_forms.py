"""Reader of `smoke_forms.toml`: small forms of the documented load tests."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Smoke:
    """Small form of a documented command; smoke_forms.toml describes the fields."""

    command: str
    form: str
    keys: tuple[str, ...] = ()
    reason: str = ""
    needs: tuple[str, ...] = ()


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SMOKES = tuple(
    Smoke(**row | {key: tuple(row.get(key, ())) for key in ("keys", "needs")})
    for row in _FILE["form"]
)
# Documented keys that no form prints: command -> key -> reason.
LACKING: Mapping[str, Mapping[str, str]] = _FILE["lacking"]
