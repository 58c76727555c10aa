"""What a job's engines loaded of keys and values that they would else have computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from meshrl.common.state.registry import Entry

TIERS = ("memory", "disk", "peers", "engines")  # tokens by where they came from; see `told`


def figures(stats: Mapping[str, Any]) -> dict[str, float]:
    """What an engine publishes of it, by name; nothing if it has loaded nothing."""
    kv = stats.get("kv") or {}
    found = {f"{tier}_tokens": float(n) for tier, n in kv.get("loaded", {}).items()}
    found["again_tokens"] = float(kv.get("again", 0))
    found["bytes_in"] = float(sum(kv.get("bytes_in", {}).values()))
    found["bytes_out"] = float(sum(kv.get("bytes_out", {}).values()))
    found["saved_s"] = float(kv.get("saved_s", 0.0))
    return {name: value for name, value in found.items() if value}


def summed(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The figures of all engines."""
    total: Counter[str] = Counter()
    for one in found:
        total.update(one)
    return {name: round(value, 3) for name, value in total.items()}


def of_engines(entries: Iterable[Entry]) -> dict[str, float]:
    """The figures of the engines that live."""
    return summed(figures(e.stats) for e in entries if e.alive and e.kind == "engine")


def trouble(entries: Iterable[Entry]) -> str:
    """Why an engine cannot keep any; empty: it can."""
    for entry in entries:
        for why in (entry.stats.get("kv") or {}).get("refused", []):
            return f"{entry.name} cannot keep keys and values: {why}"
    return ""


def told(found: Mapping[str, float]) -> str:
    """For people; empty: nothing was loaded."""
    parts = [(tier, int(found.get(f"{tier}_tokens", 0))) for tier in TIERS]
    loaded = [f"{n:,} from {tier}" for tier, n in parts if n]
    again = int(found.get("again_tokens", 0))
    if not loaded and not again:
        return ""
    moved = (found.get("bytes_in", 0.0) + found.get("bytes_out", 0.0)) / 1e9
    said = ", ".join(loaded) or "none"
    return (
        f"{said}; {again:,} computed again; {moved:,.2f} GB moved, "
        f"{found.get('saved_s', 0.0):,.1f} s of prefill saved"
    )
