"""Figures of an engine's keys and values: loaded instead of computed, and lost to preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from meshrl.common.state.registry import RegistryEntry

SOURCES = ("memory", "disk", "peers", "engines")  # of loaded tokens, in the order of display


def extract_figures(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return an engine's published prefix figures by name; nothing if it has loaded nothing."""
    kv = stats.get("kv") or {}
    found = {f"{tier}_tokens": float(n) for tier, n in kv.get("loaded_tokens", {}).items()}
    found["again_tokens"] = float(kv.get("recomputed_tokens", 0))
    found["bytes_in"] = float(sum(kv.get("bytes_in", {}).values()))
    found["bytes_out"] = float(sum(kv.get("bytes_out", {}).values()))
    found["saved_s"] = float(kv.get("saved_s", 0.0))
    if stats.get("preempted"):
        found["preempted"] = float(stats["preempted"])
        found["cache_tokens"] = float(stats.get("cache_tokens", 0))
    return {name: value for name, value in found.items() if value}


def sum_figures(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the figures of all engines."""
    total: Counter[str] = Counter()
    for one in figures:
        total.update(one)
    return {name: round(value, 3) for name, value in total.items()}


def sum_engine_figures(entries: Iterable[RegistryEntry]) -> dict[str, float]:
    """Return the sums of the figures of the live engines."""
    return sum_figures(extract_figures(e.stats) for e in entries if e.alive and e.kind == "engine")


def find_offload_error(entries: Iterable[RegistryEntry]) -> str:
    """Return why an engine cannot offload keys and values; empty if it can."""
    for entry in entries:
        for why in (entry.stats.get("kv") or {}).get("rejection_reasons", []):
            return f"{entry.name} cannot offload keys and values: {why}"
    return ""


def format_prefix_figures(figures: Mapping[str, float]) -> str:
    """Return the figures for people; empty if nothing was loaded or preempted."""
    return "; ".join(filter(None, (_format_loads(figures), _format_preemptions(figures))))


def _format_preemptions(figures: Mapping[str, float]) -> str:
    if not (count := int(figures.get("preempted", 0))):
        return ""
    tokens = int(figures.get("cache_tokens", 0))
    return f"{count:,} preemptions" + (f" in caches of {tokens:,} tokens" if tokens else "")


def _format_loads(figures: Mapping[str, float]) -> str:
    parts = [(tier, int(figures.get(f"{tier}_tokens", 0))) for tier in SOURCES]
    loaded = [f"{n:,} from {tier}" for tier, n in parts if n]
    again = int(figures.get("again_tokens", 0))
    if not loaded and not again:
        return ""
    moved = (figures.get("bytes_in", 0.0) + figures.get("bytes_out", 0.0)) / 1e9
    loaded_text = ", ".join(loaded) or "none"
    return (
        f"{loaded_text}; {again:,} recomputed; {moved:,.2f} GB moved, "
        f"{figures.get('saved_s', 0.0):,.1f} s of prefill saved"
    )
