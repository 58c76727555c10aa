"""The sections of a report: figures as charts, what was measured as tables, the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from common.job.config import JobConfig
from common.job.evaluation_plan import GREEDY, SAMPLED
from common.state.events import Event
from meshrl.job.toml.writing import to_toml
from meshrl.view.history import gangs
from meshrl.view.history.failures import of_share
from meshrl.view.history.run_snapshot import Evaluation
from meshrl.view.history.samples import Sample, heading, of_evaluations, parts
from meshrl.view.report import charts, figures
from meshrl.view.report.charts import Figure

Section = tuple[str, str]  # title, HTML


def learning(rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> list[Section]:
    """Reward and held-out over the steps, and the measured points as a table."""
    found = charted([figures.learning(rows, evaluations)])
    if any(e.sampled is not None or e.greedy is not None for e in evaluations):
        found.append(("Held-out", _measured(evaluations)))
    return found


def charted(found: Sequence[Figure]) -> list[Section]:
    """Figures as charts."""
    return [(figure.title, charts.lines(figure.series, "step")) for figure in found]


def moves(events: Sequence[Event]) -> list[Section]:
    """What was predicted of each move, and what it came to, of those that were judged."""
    judged = gangs.judged(events)
    names = ("before", "predicted", "observed", "expected", "regret")
    head = "".join(f"<th>{name}, s</th>" for name in names)
    body = ""
    for fields in judged:
        cells = "".join(f"<td class=n>{_seconds(fields.get(f'{name}_s'))}</td>" for name in names)
        said = gangs.what(fields), fields.get("policy", ""), gangs.verdict(fields)
        what, policy, verdict = (escape(str(text)) for text in said)
        about = f"<td class=n>{fields.get('step', '')}</td><td>{what}</td><td>{policy}</td>"
        body += f"<tr>{about}{cells}<td>{verdict}</td></tr>"
    about = "<th>step</th><th>move</th><th>rule</th>"
    table = f"<table><tr>{about}{head}<th></th></tr>{body}</table>"
    return [("Moves: predicted, observed, regret", table)] if judged else []


def _seconds(value: Any) -> str:
    return "" if value is None else f"{float(value):.2f}"


def _measured(evaluations: Sequence[Evaluation]) -> str:
    others = sorted({n for e in evaluations for n in e.figures} - {SAMPLED, GREEDY})
    names = (SAMPLED, GREEDY, *others)
    head = "".join(f"<th>{escape(n)}</th>" for n in ("step", "sampled", "greedy", *others))
    body = ""
    for e in evaluations:
        found = e.figures | {SAMPLED: e.sampled, GREEDY: e.greedy}
        cells = "".join(f"<td class=n>{_value(e, n, found.get(n))}</td>" for n in names)
        mark = " (best)" if e.best else ""
        body += f"<tr><td class=n>{e.step}{mark}</td>{cells}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _value(e: Evaluation, name: str, value: float | None) -> str:
    """A figure, and of which share of its samples it is unless it is of all."""
    share = e.shares.get(name)
    if value is None:
        return "no sample was scored" if share == 0 else ""
    return f"{value:.3f}{of_share(share)}"


def job(document: dict[str, Any]) -> str:
    """The keys of a job that are not as by default; all of them folded away."""
    bare = {key: value for key, value in document.items() if key != "bundle"}
    defaults = JobConfig().document()
    defaults["cache"] = str(Path(defaults["cache"]).expanduser())  # as a submitted job has it
    changed = to_toml(differing(bare, defaults))
    whole = to_toml(document)
    return (
        f"<pre>{escape(changed)}</pre><details><summary>every key, defaults too</summary>"
        f"<pre>{escape(whole)}</pre></details>"
    )


def differing(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What is not equal to its default; a table that is has none left."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            if left := differing(value, default):
                found[key] = left
        elif value != default:
            found[key] = value
    return found


def trajectories(kept: Sequence[Sample]) -> str:
    """Evaluated trajectories as HTML, each folded under its heading."""
    found = []
    for sample in of_evaluations(kept):
        told = "".join(
            f'<p><b>{escape(title)}</b></p><pre class="{role}">{escape(text)}</pre>'
            for role, title, text in parts(sample)
        )
        found.append(f"<details><summary>{escape(heading(sample))}</summary>{told}</details>")
    return "".join(found)
