"""Table of a run's results: printed at its end, and first in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from meshrl.common.job.evaluation_plan import NAMED_APART
from meshrl.view.health.findings import has_failure, parse_findings
from meshrl.view.history.job_failures import (
    FailureKind,
    format_counts,
    format_figures,
    format_share,
)
from meshrl.view.live.run_text import format_duration
from meshrl.view.mesh.prefix_stats import format_prefix_figures
from meshrl.view.terminal import Console


def print_summary(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the closing table."""
    table = Table(title=f"{summary['job']}, seed {summary['seed']}: {summary['phase']}", box=None)
    table.title_justify = "left"
    table.add_column("", style="dim")
    table.add_column("")
    for name, value in list_facts(summary):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"{run_dir / 'report.html'}", soft_wrap=True, highlight=False)


def list_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as (name, value) for people."""

    lost_text = "" if summary["lost"] is None else f"{summary['lost']} lost, "

    def accuracy(key: str) -> str:
        evaluation = summary["held_out"][key]
        if not evaluation:
            return "-"
        modes = ("sampled", "greedy")
        accuracies = (
            f"{evaluation[m]:.3f} {m}{format_share(evaluation.get(f'{m}_share'))}" for m in modes
        )
        return ", ".join(accuracies)

    idle_times = [
        f"{format_duration(summary[f'{state}_s'])} {state}"
        for state in ("waiting", "paused")
        if summary[f"{state}_s"] >= 1.0
    ]
    used = ", ".join([f"{summary['accelerator_s']:,.0f} accelerator-seconds", *idle_times])
    kinds = [FailureKind(**failure) for failure in summary["failures"]]
    failed = f"{100 * summary['failed_share']:.1f} %"
    failed += f": {format_counts(kinds).removeprefix('failed so far: ')}" if kinds else ""
    cached = " (warm start from the cache)" if summary["warm_start_cached"] else ""
    gap = summary["logprob_gap_max"]
    loss = summary.get("loss")
    is_sampled = any(summary["held_out"].values())
    source = "read" if loss else "rolled out"  # without engines, the tokens are those of rows
    return [
        *([("loss", _format_losses(loss))] if loss else []),
        *([("held-out before", accuracy("before"))] if is_sampled else []),
        *([("held-out after", accuracy("after"))] if is_sampled else []),
        ("steps", str(summary["steps"])),
        *_list_evaluations(summary),
        (
            "time",
            f"{format_duration(summary['wall_s'])}{cached}; {summary['cpu_total_s']:.0f} "
            "CPU-seconds",
        ),
        (
            "tokens",
            f"{summary['tokens_rolled_out']:,} {source}, {summary['tokens_trained']:,} trained",
        ),
        *(
            [("prefixes loaded", prefix_text)]
            if (prefix_text := format_prefix_figures(summary.get("prefixes", {})))
            else []
        ),
        ("workers", used),
        *([("cost", _format_cost(summary))] if summary.get("cost") is not None else []),
        *([("time slices", format_slices(slices))] if (slices := summary.get("slices")) else []),
        *([("log-probability gap", f"{gap:.1e} at most")] if gap is not None else []),
        ("workers moved", f"{summary['workers_moved']} times to make steps faster"),
        *([("hosts lost", str(summary["hosts_lost"]))] if summary["hosts_lost"] else []),
        (
            "trajectories",
            f"{summary['opened']} opened, {summary['trained']} trained, {summary['filtered']} "
            f"filtered, {summary['stale_requeued'] + summary['host_lost']} requeued, "
            f"{summary['typed_drops']} failed, {lost_text}{summary['trained_twice']} trained twice",
        ),
        *([("failed", failed)] if kinds or summary["typed_drops"] else []),
        ("health", _describe_health(summary)),
    ]


def format_slices(slices: dict[str, Any]) -> str:
    """Return accelerator-seconds by function, and the switches between instances."""
    seconds: dict[str, float] = slices["by_function_s"]
    by_function = ", ".join(f"{function} {of:,.1f} s" for function, of in seconds.items())
    switch_s = slices["switch_s"]
    share = switch_s / ((switch_s + sum(seconds.values())) or 1.0)
    switches = f"switches {switch_s:,.1f} s ({100 * share:.1f} %)"
    if (hidden := slices["hidden_share"]) is not None:
        switches += f", {100 * hidden:.0f} % of the loaded bytes prefetched"
    return f"{by_function}; {switches}"


def _format_cost(summary: dict[str, Any]) -> str:
    """Return the cost of the workers, in the currency of their prices."""
    per_million = summary["cost_per_million_tokens"]
    each = f", {per_million:,.4g} per million trained tokens" if per_million is not None else ""
    return f"{summary['cost']:,.4g}{each}"


def _describe_health(summary: dict[str, Any]) -> str:
    """Return the rules with findings; summaries of earlier versions have none."""
    found = parse_findings(summary.get("health", ()))
    names = ", ".join(finding.rule for finding in found)
    if has_failure(found):
        return f"the run cannot have learned: {names}"
    return names or describe_no_finding(summary)


def describe_no_finding(summary: dict[str, Any]) -> str:
    """Return the text of a run without findings about its health."""
    return "no finding" if summary["steps"] else "no step to judge"


def _format_losses(loss: dict[str, float]) -> str:
    text = f"{loss['first']:.4f} in the first step, {loss['last']:.4f} in the last"
    return text + (f"; held-out {loss['held_out']:.4f}" if "held_out" in loss else "")


def _list_evaluations(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return an early stop, the best version, and the last evaluation of other sets, if any."""
    every = summary["evaluations"]
    best = [e for e in every if e["step"] == summary["best_version"]]
    last = [e for e in every if e["figures"].keys() - NAMED_APART]
    stop = summary.get("early_stop")
    return [
        *([("stopped early", stop["reason"])] if stop else []),
        *(
            (what, f"{e['step']}: {format_figures(e['figures'], e.get('shares', {}))}")
            for what, rows in (("best version", best), ("evaluated last", last))
            for e in rows[-1:]
        ),
    ]
