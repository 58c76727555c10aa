"""Report of a run as one self-contained page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from html import escape
from pathlib import Path
from typing import Any

from meshrl.common.job.config import JobConfig
from meshrl.common.job.evaluation_plan import GREEDY, SAMPLED
from meshrl.common.job.named_files import set_value
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import MOVE_OUTCOME_EVENT, decode_move_outcome
from meshrl.job.toml.writer import to_toml
from meshrl.view.health.findings import parse_findings
from meshrl.view.history.decisions import extract_decisions
from meshrl.view.history.event_text import format_event
from meshrl.view.history.job_failures import FailureKind, format_count, format_share
from meshrl.view.history.move_outcomes import format_outcome
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.history.worker_timeline import WorkerTimeline
from meshrl.view.mesh.slice_lanes import GangLane
from meshrl.view.report import charts, figures, timeline
from meshrl.view.report.charts import Figure
from meshrl.view.report.slice_chart import draw_slice_chart
from meshrl.view.report.summary_table import describe_no_finding, list_facts
from meshrl.view.report.trajectory_table import render_trajectories

TIMELINE_TITLE = "Timeline of workers"
STYLE, SCRIPT = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
)


def render_page(
    summary: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    document: dict[str, Any],
    refresh_s: float = 0.0,
    kept_samples: Sequence[dict[str, Any]] = (),
    lanes: Sequence[GangLane] = (),
) -> str:
    """Return the report as one self-contained page, which reloads every `refresh_s` unless that is
    0.

    `kept_samples` are those of `select_report_samples`, `lanes` those of `read_lanes`.
    """
    start_ms = events[0].ms if events else 0
    event_rows = [
        (f"{(e.ms - start_ms) / 1000:.1f} s", text) for e in events if (text := format_event(e))
    ]
    kinds = [FailureKind(**failure) for failure in summary["failures"]]
    failed = [(format_count(f), ". ".join(filter(None, (f.text, f.fix)))) for f in kinds]
    decided = [
        (f"{(d.decided_ms - start_ms) / 1000:.1f} s", d.summary) for d in extract_decisions(events)
    ]
    every = [
        ("Summary", _render_table(list_facts(summary))),
        *render_health(summary),
        *render_learning(rows, evaluations),
        *render_figures(figures.make_evaluation_figures(evaluations)),
        *render_figures(figures.make_health_figures(rows, events)),
        *render_figures(figures.make_trajectory_figures(rows)),
        (TIMELINE_TITLE, timeline.draw_timeline(WorkerTimeline.from_events(events))),
        *([("Time slices", draw_slice_chart(lanes))] if lanes else []),
        *render_moves(events),
        *render_figures([figures.make_time_figure(rows)]),
        *([("Failed trajectories", _render_table(failed))] if failed else []),
        *([("Decisions of the planner", _render_table(decided))] if decided else []),
        ("Events", _render_table(event_rows)),
        ("CPU-seconds", _render_table([(n, f"{s:.1f}") for n, s in summary["cpu_s"].items()])),
        ("Job", render_job(document)),
        ("Trajectories", render_trajectories(kept_samples)),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in every)
    phase = f": {summary['phase'].replace('_', ' ')}" if refresh_s else ""
    title = f"{escape(summary['job'])}, seed {summary['seed']}{phase}"
    again = f'<meta http-equiv="refresh" content="{refresh_s:.0f}">'
    again = f"<noscript>{again}</noscript>" if refresh_s else ""
    reload = f' data-reload="{refresh_s:.0f}"' if refresh_s else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}<title>{title}</title><style>\n{STYLE}</style></head>"
        f"<body{reload}><h1>{title}</h1>{body}<script>\n{SCRIPT}</script></body></html>\n"
    )


def _render_table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return '<p class="none">nothing</p>'
    cells = (f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"


Section = tuple[str, str]  # title, HTML


def render_health(summary: dict[str, Any]) -> list[Section]:
    """Return the findings about the run's health, with likely causes and keys to change."""
    found = parse_findings(summary.get("health", ()))
    lines = "".join(f"<li>{escape(finding.line)}</li>" for finding in found)
    nothing = f'<p class="none">{describe_no_finding(summary)}</p>'
    return [("Health", f"<ul>{lines}</ul>" if lines else nothing)]


def render_learning(
    rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]
) -> list[Section]:
    """Return reward and held-out reward over the steps, and the measured points as a table."""
    found = render_figures([figures.make_learning_figure(rows, evaluations)])
    if any(e.sampled_reward is not None or e.greedy_reward is not None for e in evaluations):
        found.append(("Held-out", _render_measurements(evaluations)))
    return found


def render_figures(figure_list: Sequence[Figure]) -> list[Section]:
    """Return figures as charts."""
    return [(figure.title, charts.draw_line_chart(figure.series, "step")) for figure in figure_list]


def render_moves(events: Sequence[Event]) -> list[Section]:
    """Return the predictions and outcomes of judged moves."""
    judged = [
        decode_move_outcome(event.ms, event.fields)
        for event in events
        if event.kind == MOVE_OUTCOME_EVENT
    ]
    names = ("before", "predicted", "observed", "expected", "regret")
    head = "".join(f"<th>{name}, s</th>" for name in names)
    body = ""
    for move in judged:
        found = (getattr(move, f"{name}_s") for name in names)
        cells = "".join(f"<td class=n>{'' if s is None else f'{s:.2f}'}</td>" for s in found)
        texts = f"{move.resident} from {move.was} to {move.to}", move.policy, format_outcome(move)
        what, policy, verdict = map(escape, texts)
        step = "" if move.step is None else move.step
        about = f"<td class=n>{step}</td><td>{what}</td><td>{policy}</td>"
        body += f"<tr>{about}{cells}<td>{verdict}</td></tr>"
    about = "<th>step</th><th>move</th><th>rule</th>"
    table = f"<table><tr>{about}{head}<th></th></tr>{body}</table>"
    return [("Moves: predicted, observed, regret", table)] if judged else []


def _render_measurements(evaluations: Sequence[Evaluation]) -> str:
    others = sorted({n for e in evaluations for n in e.figures} - {SAMPLED, GREEDY})
    names = (SAMPLED, GREEDY, *others)
    head = "".join(f"<th>{escape(n)}</th>" for n in ("step", "sampled", "greedy", *others))
    body, best_step = "", max((e.step for e in evaluations if e.is_best), default=None)
    for e in evaluations:
        found = e.figures | {SAMPLED: e.sampled_reward, GREEDY: e.greedy_reward}
        cells = "".join(f"<td class=n>{_format_value(e, n, found.get(n))}</td>" for n in names)
        mark = " (best)" if e.is_best and e.step == best_step else ""
        body += f"<tr><td class=n>{e.step}{mark}</td>{cells}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _format_value(e: Evaluation, name: str, value: float | None) -> str:
    """Return a figure, with the share of its samples unless it covers all."""
    share = e.scored_shares.get(name)
    if value is None:
        return "no sample was scored" if share == 0 else ""
    return f"{value:.3f}{format_share(share)}"


def render_job(document: dict[str, Any]) -> str:
    """Return the job's non-default keys; all keys are folded away.

    Hub ids replace the bundle's paths of what the run fetched from the Hub.
    """
    bare = deepcopy({key: value for key, value in document.items() if key != "bundle"})
    for key, origin in document.get("bundle", {}).get("origins", {}).items():
        set_value(bare, key, origin["repository"])
    defaults = JobConfig().to_document()
    defaults["cache"] = str(Path(defaults["cache"]).expanduser())  # as a submitted job has it
    changed = to_toml(find_differences(bare, defaults))
    toml_text = to_toml(document)
    return (
        f"<pre>{escape(changed)}</pre><details><summary>all keys, including "
        f"defaults</summary><pre>{escape(toml_text)}</pre></details>"
    )


def find_differences(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from their defaults; tables are compared key by key."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            if differences := find_differences(value, default):
                found[key] = differences
        elif value != default:
            found[key] = value
    return found
