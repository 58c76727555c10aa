"""The plots of a scenario's arms: a page of HTML, and a PNG file of each figure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

from meshrl.sim.cluster.model.cluster import Cluster
from meshrl.sim.cluster.model.job import SimJob
from meshrl.view.report import charts, png
from meshrl.view.report.charts import Figure, Series
from meshrl.view.report.page import STYLE


def draw(title: str, table: str, arms: Mapping[str, Cluster], out: Path) -> list[Path]:
    """Writes `index.html` and PNG files into a directory; NotFound without matplotlib."""
    png.needed()
    out.mkdir(parents=True, exist_ok=True)
    found = figures(arms)
    body = "".join(
        f"<h2>{escape(one.title)}</h2>{charts.lines(one.series, label)}" for one, label in found
    )
    page = out / "index.html"
    page.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(title)}</h1><pre>{escape(table)}</pre>{body}</html>\n",
        encoding="utf-8",
    )
    drawn = (png.lines(one, out, label) for one, label in found)
    return [page, *(path for path in drawn if path is not None)]


def figures(arms: Mapping[str, Cluster]) -> list[tuple[Figure, str]]:
    """Each with the label of its axis: of every job its steps by arm, and who did what when."""
    found: list[tuple[Figure, str]] = []
    for job in dict.fromkeys(name for cluster in arms.values() for name in cluster.jobs):
        there = {arm: cluster.jobs[job] for arm, cluster in arms.items() if job in cluster.jobs}
        steps = []
        for arm, one in there.items():
            ends = pairwise([one.began_s or 0.0, *one.training.ended_s])
            steps.append(Series(arm, [(float(n), b - a) for n, (a, b) in enumerate(ends, 1)]))
        found.append((Figure(f"{job}: seconds of a step", steps), "step"))
        for arm, one in there.items():
            shares = Figure(f"{job}, {arm}: workers", _shares(one, arms[arm].agenda.now_s))
            found.append((shares, "seconds"))
    return found


def _shares(job: SimJob, end_s: float) -> list[Series]:
    """Stairs of how many workers generate, and train."""
    found: list[list[tuple[float, float]]] = [[], []]
    ends = [since_s for since_s, *_ in job.shares[1:]] + [end_s]
    for (since_s, *counts), until_s in zip(job.shares, ends, strict=True):
        for points, count in zip(found, counts, strict=True):
            points += [(since_s, float(count)), (until_s, float(count))]
    return [Series("rollout", found[0]), Series("training", found[1])]
