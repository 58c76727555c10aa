"""Profiles of accelerators: what a kind can do at most, and which shares of that are reached."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError

BUSY_SHARE = 0.55  # share of peak arithmetic that prefill reaches,
TRAIN_SHARE = 0.4  # that training reaches, as dense models of some 10e9 parameters are reported to,
READ_SHARE = 0.85  # share of peak bandwidth that decoding reaches (Libra's cost model, model.py)
COLLECTIVE_S = 8e-6  # an all-reduce of a few bytes between accelerators of a host (the same)

CPU = "CPU"  # the kind whose workers have no arithmetic of their own: a host's share its cores

DECLARED = Path(__file__).parent / "accelerators.toml"
_SHARES = ("busy_share", "train_share", "read_share")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator. Bandwidths are of one accelerator, links' are one way."""

    kind: str
    flops: float  # dense operations a second, in 16 bits
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # within a host
    network_bytes_per_s: float  # between hosts
    busy_share: float = BUSY_SHARE
    train_share: float = TRAIN_SHARE
    read_share: float = READ_SHARE
    collective_s: float = COLLECTIVE_S

    @property
    def busy_flops(self) -> float:
        """Operations a second that generation reaches."""
        return self.flops * self.busy_share

    @property
    def train_flops(self) -> float:
        """Operations a second that training reaches."""
        return self.flops * self.train_share

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes a second that are read of its memory."""
        return self.memory_bytes_per_s * self.read_share


@cache
def declared() -> Mapping[str, Accelerator]:
    """The kinds that come with this software, by name."""
    return _read(DECLARED)


def profiles(path: Path | None = None) -> dict[str, Accelerator]:
    """The declared kinds, with those of a user's file in front of them. ConfigError when it cannot
    be read or holds what no accelerator has.
    """
    return dict(declared()) | (_read(path) if path is not None else {})


def kind_of(name: str, known: Mapping[str, Accelerator] | None = None) -> str:
    """The kind of an accelerator with this name of its driver's, as A100 of `NVIDIA
    A100-SXM4-80GB` and CPU of `cpu:0`; empty when none of the known kinds is in it.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((kind for kind in (known or declared()) if kind.lower() in words), "")


def _read(path: Path) -> dict[str, Accelerator]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"profiles of accelerators cannot be read: {error}",
            where=str(path),
            fix=f"write a table a kind, as {DECLARED.name} of this software has them",
        ) from None
    return {kind: _accelerator(kind, table, f"{path}: [{kind}]") for kind, table in tables.items()}


def _accelerator(kind: str, table: Any, where: str) -> Accelerator:
    if not isinstance(table, dict):
        raise ConfigError(f"{kind} is no table", where=where, fix=f"write [{kind}] and its values")
    known = [one for one in fields(Accelerator) if one.name != "kind"]
    unknown = sorted(set(table) - {one.name for one in known})
    if unknown:
        names = ", ".join(one.name for one in known)
        raise ConfigError(f"{unknown[0]} is not known", where=where, fix=f"use {names}")
    missing = [one.name for one in known if one.default is MISSING and one.name not in table]
    if missing:
        fix = f"add {missing[0]} = ..., as the maker's data sheet has it"
        raise ConfigError(f"{missing[0]} is missing", where=where, fix=fix)
    for name, value in table.items():
        _check(name, value, f"{where} {name}")
    return Accelerator(kind, **{name: float(value) for name, value in table.items()})


def _check(name: str, value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    most = 1.0 if name in _SHARES else math.inf
    least_is_open = name != "collective_s"
    if not number or not math.isfinite(value) or value < 0 or (least_is_open and value == 0):
        raise ConfigError(
            f"{value!r} is no number above 0", where=where, fix="write one, such as 312e12"
        )
    if value > most:
        raise ConfigError(f"{value!r} is more than all", where=where, fix="write a share up to 1")
