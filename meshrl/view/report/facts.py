"""What a run came to, line by line: the table at its end, and the first one of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from meshrl.common.job.evaluation_plan import HELD_OUT
from meshrl.view.history.failures import FailureKind, counts, named_figures, of_share
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

    held = [
        f"{clock(found[f'{state}_s'])} {state}"
        for state in ("waiting", "paused")
        if found[f"{state}_s"] >= 1.0
    ]
    used = ", ".join([f"{found['accelerator_s']:,.0f} accelerator-seconds", *held])
    kinds = [FailureKind(**failure) for failure in found["failures"]]
    failed = f"{100 * found['failed_share']:.1f} %"
    failed += f": {counts(kinds).removeprefix('failed so far: ')}" if kinds else ""
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
        ("workers", used),
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
        *([("failed", failed)] if kinds or found["typed_drops"] else []),
    ]


def _evaluations(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The best version, if the job asks for it, and what the last one came to elsewhere."""
    every = found["evaluations"]
    best = [e for e in every if e["step"] == found["best_version"]]
    last = [e for e in every if any(not n.startswith(f"{HELD_OUT}.") for n in e["figures"])]
    return [
        (what, f"{e['step']}: {named_figures(e['figures'], e.get('shares', {}))}")
        for what, rows in (("best version", best), ("evaluated last", last))
        for e in rows[-1:]
    ]
