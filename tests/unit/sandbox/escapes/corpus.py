"""Escape corpus by family, with the programs that are not contained yet."""

from __future__ import annotations

from pathlib import Path

from tests.unit.sandbox.escapes import program

PROGRAMS = Path(__file__).parent / "programs"
_NAMES = "network files processes memory output kernel cpu identity channels"
FAMILIES = {family: program.read(PROGRAMS / f"{family}.toml") for family in _NAMES.split()}
POISONS: list[program.Poison] = program.read(PROGRAMS / "poison.toml")

EVERYWHERE = ("cgroup", "bwrap", "landlock")
WITHOUT_GROUPS = ("bwrap", "landlock")
_OPEN: dict[tuple[str, ...], dict[str, str]] = {
    EVERYWHERE: {
        "tests forging": "lies by methods (python)",
    },
    WITHOUT_GROUPS: {
        "memory": "shared maps that children keep",
    },
}


def is_open(tier: str, family: str, name: str) -> bool:
    """Return True if a program is known to escape in that tier."""
    return any(
        tier in tiers and name in families.get(family, "").split("|")
        for tiers, families in _OPEN.items()
    )
