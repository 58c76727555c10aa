"""`meshrl weights --explain`: by which way each process got the last version, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.base.files.lines import whole
from common.state import registry
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.target import Run, may_live, run_of
from meshrl.view.live import printing

WAY = "weights_way"  # a counter of processes that receive versions, and an event when it changes
MIB = 1 << 20


def explain(run: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Prints it of the processes of a mesh that runs, else what a run has on record."""
    found = _told(run_of(run, mesh))
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print(
            "no version had to be brought anywhere: on the store's own host its files are mapped, "
            "and no process of another host has received one"
        )
        return
    table = printing.table("process", "way", "bytes", "took", "predicted", "why")
    for one in found:
        size, took = f"{one['bytes'] / MIB:.3g} MiB", f"{one['took_s']:.3g} s"
        why = "; ".join(text for text in (one["why"], one["verdict"]) if text)
        table.add_row(one["process"], one["way"], size, took, _seconds(one["predicted_s"]), why)
    printing.show(table)
    for way, rate in sorted(_rates(found).items()):
        print(f"{way}: {rate / MIB:.3g} MiB/s")


def _told(run: Run) -> list[dict[str, Any]]:
    """What each process told last, by its name."""
    if may_live(run.place):
        entries = ask(run.place, registry.entries, ANSWER_S)
        told = {e.name: e.stats[WAY] | {"process": e.name} for e in entries if e.stats.get(WAY)}
    else:
        told = {
            event["fields"]["process"]: event["fields"]
            for event in whole(run.directory / "events.jsonl", f'"{WAY}"')
            if event["kind"] == WAY
        }
    return [told[name] for name in sorted(told)]


def _rates(found: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of what processes have measured of each way, in bytes a second."""
    measured: dict[str, list[float]] = {}
    for one in found:
        for way, rate in one["rates"].items():
            measured.setdefault(way, []).append(rate)
    return {way: sum(rates) / len(rates) for way, rates in measured.items()}


def _seconds(predicted: float | None) -> str:
    return "" if predicted is None else f"{predicted:.3g} s"
