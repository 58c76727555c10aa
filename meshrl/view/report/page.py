"""The report of a run as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from common.state.events import Event
from meshrl.view.history import gangs
from meshrl.view.history.decided import decisions
from meshrl.view.history.failures import FailureKind, counted
from meshrl.view.history.gangs import TimelineMark
from meshrl.view.history.news import told, unforeseen
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.report import figures, sections, timeline
from meshrl.view.report.facts import facts

TIMELINE = "Which worker did what when"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin-top: 2em }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: #666 }
.grid { stroke: #e4e4e4 } .axis { stroke: #999 } .mark { stroke: #c00; stroke-dasharray: 2 2 }
.move { fill: #222; stroke: #fff }
.legend span { margin-right: 1.5em } .legend i { display: inline-block; width: 12px; height: 12px;
  margin-right: 6px; vertical-align: -1px }
table { border-collapse: collapse } td, th { padding: 2px 16px 2px 0; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums } .none, .note { color: #777 }
pre { background: #f6f6f6; padding: 1em; overflow: auto; font-size: 12px }
details pre { white-space: pre-wrap } pre.model { background: #eef6fb }
"""


def html(
    found: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    document: dict[str, Any],
    refresh_s: float = 0.0,
    kept: Sequence[dict[str, Any]] = (),
) -> str:
    """The report as one self-contained page, which loads itself again every `refresh_s` if that is
    not 0. `kept` are the run's samples.
    """
    start_ms = events[0].ms if events else 0
    end = (events[-1].ms - start_ms) / 1000 if events else 1.0
    news = [((e.ms - start_ms) / 1000, told(e)) for e in events]
    news = [(second, text) for second, text in news if text]
    faults = [TimelineMark((e.ms - start_ms) / 1000, told(e)) for e in events if unforeseen(e)]
    shown, marks = gangs.spans(events, start_ms, end), gangs.moves(events, start_ms)
    every = [
        ("Summary", _table(facts(found))),
        *sections.learning(rows, evaluations),
        *sections.charted(figures.evaluated(evaluations)),
        *_read(kept),
        *sections.charted(figures.health(rows, events)),
        *sections.charted(figures.trajectories(rows)),
        (TIMELINE, timeline.drawn(shown, marks, faults, end)),
        *sections.moves(events),
        *sections.charted([figures.times(rows)]),
        *_failures(found),
        *_decided(events, start_ms),
        ("What happened", _table([(f"{second:.1f} s", text) for second, text in news])),
        ("CPU-seconds", _table([(n, f"{s:.1f}") for n, s in found["cpu_s"].items()])),
        ("Job", sections.job(document)),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in every)
    phase = f": {found['phase'].replace('_', ' ')}" if refresh_s else ""
    title = f"{escape(found['job'])}, seed {found['seed']}{phase}"
    again = f'<meta http-equiv="refresh" content="{refresh_s:.0f}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1>{body}</html>\n"
    )


def _read(kept: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Trajectories of evaluations, for reading."""
    shown = sections.trajectories(kept)
    return [("Trajectories of evaluations", shown)] if shown else []


def _failures(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What failed in the job's own code, by kind and place."""
    kinds = [FailureKind(**failure) for failure in found["failures"]]
    rows = [(counted(f), ". ".join(filter(None, (f.text, f.fix)))) for f in kinds]
    return [("Failed trajectories", _table(rows))] if rows else []


def _decided(events: Sequence[Event], start_ms: int) -> list[tuple[str, str]]:
    """What the planner has decided about the job, by which rule and from which figures."""
    rows = [((d.ms - start_ms) / 1000, d) for d in decisions(events)]
    told = [(f"{second:.1f} s", d.text) for second, d in rows]
    return [("What the planner decided", _table(told))] if told else []


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return '<p class="none">nothing</p>'
    cells = (f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"
