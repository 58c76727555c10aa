"""What a run came to, line by line: the table at its end, and the first one of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from common.job.evaluation_plan import HELD_OUT
from meshrl.view.history.failures import FailureKind, counts, of_share
from meshrl.view.live.view import clock
from meshrl.view.mesh.prefixes import told
from meshrl.view.terminal import Console


def show(found: dict[str, Any], run_dir: Path) -> None:
    """The closing table."""
    table = Table(title=f"{found['job']}, seed {found['seed']}: {found['phase']}", box=None)
    table.title_justify = "left"
    table.add_column("", style="dim")
    table.add_column("")
    for name, value in facts(found):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"{run_dir / 'report.html'}", soft_wrap=True, highlight=False)


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, value) for people."""

    lost = "" if found["lost"] is None else f"{found['lost']} lost, "

    def accuracy(key: str) -> str:
        held = found["held_out"][key]
        if not held:
            return "-"
        modes = ("sampled", "greedy")
        said = (f"{held[m]:.3f} {m}{of_share(held.get(f'{m}_share'))}" for m in modes)
        return ", ".join(said)

    cached = " (warm start from the cache)" if found["warm_start_cached"] else ""
    gap = found["logprob_gap_max"]
    return [
        ("held-out before", accuracy("before")),
        ("held-out after", accuracy("after")),
        ("steps", str(found["steps"])),
        *_evaluations(found),
        ("time", f"{clock(found['wall_s'])}{cached}; {found['cpu_total_s']:.0f} CPU-seconds"),
        (
            "tokens",
            f"{found['tokens_rolled_out']:,} rolled out, {found['tokens_trained']:,} trained",
        ),
        *([("prefixes loaded", said)] if (said := told(found.get("prefixes", {}))) else []),
        ("workers", _workers(found)),
        ("log-probability gap", "-" if gap is None else f"{gap:.1e} at most"),
        ("workers moved", f"{found['workers_moved']} times to make steps faster"),
        *([("hosts lost", str(found["hosts_lost"]))] if found["hosts_lost"] else []),
        (
            "trajectories",
            f"{found['opened']} opened, {found['trained']} trained, {found['filtered']} filtered, "
            f"{found['stale_requeued'] + found['host_lost']} given back, "
            f"{found['typed_drops']} failed, {lost}"
            f"{found['trained_twice']} trained twice",
        ),
        *_failed(found),
    ]


def _workers(found: dict[str, Any]) -> str:
    """What the job had of the mesh's workers, and how long it had to do without."""
    held = [
        f"{clock(found[f'{state}_s'])} {state}"
        for state in ("waiting", "paused")
        if found[f"{state}_s"] >= 1.0
    ]
    return ", ".join([f"{found['accelerator_s']:,.0f} accelerator-seconds", *held])


def _failed(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The share of trajectories that failed, and why."""
    kinds = [FailureKind(**failure) for failure in found["failures"]]
    if not kinds and not found["typed_drops"]:
        return []
    why = counts(kinds).removeprefix("failed so far: ") if kinds else ""
    return [("failed", f"{100 * found['failed_share']:.1f} %" + (f": {why}" if why else ""))]


def _evaluations(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The best version, if the job asks for it, and what the last one came to elsewhere."""
    every = found["evaluations"]
    best = [e for e in every if e["step"] == found["best_version"]]
    last = [e for e in every if any(not n.startswith(f"{HELD_OUT}.") for n in e["figures"])]
    return [
        (what, f"{e['step']}: " + _figures(e))
        for what, rows in (("best version", best), ("evaluated last", last))
        for e in rows[-1:]
    ]


def _figures(e: dict[str, Any]) -> str:
    shares = e.get("shares", {})
    return ", ".join(f"{n} {v:.3f}{of_share(shares.get(n))}" for n, v in e["figures"].items())
