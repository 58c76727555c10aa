"""The sections of a report that tell of learning and of the health of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.job.config import JobConfig
from common.job.evaluation_plan import GREEDY, SAMPLED
from common.state.events import Event
from meshrl import dryrun
from meshrl.observe.live.watch import Evaluation
from meshrl.observe.report import charts
from meshrl.observe.report.charts import Series
from meshrl.observe.standing.failures import of_share

Points = list[tuple[float, float]]
Section = tuple[str, str]  # title, HTML


def column(rows: Sequence[dict[str, Any]], key: str) -> Points:
    """(step, value) of the rows that have one."""
    return [(float(r["step"]), float(r[key])) for r in rows if r.get(key) is not None]


def learning(rows: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> list[Section]:
    """Reward and held-out over the steps, and the measured points as a table."""
    held = [(float(e.step), e.sampled) for e in evaluations if e.sampled is not None]
    greedy = [(float(e.step), e.greedy) for e in evaluations if e.greedy is not None]
    curves = [
        Series("reward of the step", column(rows, "reward")),
        Series("held-out, sampled", held, dots=True),
        Series("held-out, greedy", greedy, dots=True),
    ]
    found = [("Learning", charts.lines(curves, "step"))]
    if held or greedy:
        found.append(("Held-out", _measured(evaluations)))
    return found


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


def health(rows: Sequence[dict[str, Any]], events: Sequence[Event]) -> list[Section]:
    """What to look at when it does not learn: failures first, then what the gradient is made of."""
    failed = [
        Series("of the trajectories of a step", column(rows, "failed_share") or failures(events))
    ]
    spread = [
        Series("standard deviation of the rewards within a group", column(rows, "reward_spread"))
    ]
    entropy = [Series("nats a token", column(rows, "entropy"))]
    kl = [Series("from the policy that sampled", column(rows, "kl"))]
    for key, label in (("reference_kl", "from the reference"), ("teacher_kl", "from the teacher")):
        if points := column(rows, key):
            kl.append(Series(label, points))
    norm = [Series("before clipping", column(rows, "grad_norm"))]
    clipped = [
        Series("made likelier", column(rows, "clipped_high")),
        Series("made unlikelier", column(rows, "clipped_low")),
    ]
    speed = [
        Series("rolled out", per_second(rows, "tokens")),
        Series("trained", per_second(rows, "tokens_trained")),
    ]
    every = {
        "Failed trajectories, share": failed,
        "Reward spread": spread,
        "Entropy": entropy,
        "KL divergence, nats": kl,
        "Gradient norm": norm,
        "Clipped tokens, share": clipped,
        "Tokens a second": speed,
    }
    return [(title, charts.lines(series, "step")) for title, series in every.items()]


def failures(events: Sequence[Event]) -> Points:
    """(step, share of its trajectories that failed by type) of the lineage that stands."""
    found: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.kind == "step":
            samples = sum(int(row["samples"]) for row in event.fields["groups"])
            scored = sum(int(row["scored"]) for row in event.fields["groups"])
            found[int(event.fields["step"])] = samples - scored, samples
        elif event.kind in ("lineage", "restored"):
            version = int(event.fields["version"])
            found = {step: share for step, share in found.items() if step <= version}
    return [(float(step), failed / of) for step, (failed, of) in sorted(found.items()) if of]


def per_second(rows: Sequence[dict[str, Any]], key: str) -> Points:
    """(step, tokens a second) between the commits of two steps that follow each other; the first
    step of a session, which took the break before it along, is left out.
    """
    spans = [(float(b["wall"]) - float(a["wall"]), b) for a, b in pairwise(rows) if "wall" in a]
    usual = sorted(span for span, _ in spans)[len(spans) // 2] if spans else 0.0
    return [
        (float(row["step"]), float(row[key]) / span)
        for span, row in spans
        if 0.0 < span < 20.0 * usual
    ]


def job(document: dict[str, Any]) -> str:
    """The keys of a job that are not as by default; all of them folded away."""
    bare = {key: value for key, value in document.items() if key != "bundle"}
    defaults = JobConfig().document()
    defaults["cache"] = str(Path(defaults["cache"]).expanduser())  # as a submitted job has it
    changed = dryrun.to_toml(differing(bare, defaults))
    whole = dryrun.to_toml(document)
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
