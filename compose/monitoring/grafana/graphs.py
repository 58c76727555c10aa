"""A dashboard as Grafana reads it, made from rows of graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "meshrl-prometheus"}
WIDTH, HEIGHT = 24, 8  # Grafana's grid, and a graph's part of it


@dataclass(frozen=True)
class Graph:
    """One panel: what it says, and the series as (legend, expression)."""

    title: str
    about: str
    series: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"  # or stat, table
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """Rows of graphs, with the variables that its expressions name."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Graph, ...]], ...]
    variables: tuple[tuple[str, str, bool], ...] = ()  # name, query, several at once


def graph(title: str, about: str, *series: tuple[str, str], **how: Any) -> Graph:
    """Return a panel with its series."""
    return Graph(title, about, series, **how)


def model(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard as the JSON that Grafana reads."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["meshrl"],
        "schemaVersion": 38,
        "editable": False,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["meshrl"], "title": "MeshRL", "asDropdown": False}
        ],
        "templating": {"list": [_variable(*variable) for variable in dashboard.variables]},
        "panels": list(_panels(dashboard)),
    }


def _variable(name: str, query: str, several: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # with the time range: jobs come and go
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if several else {}),
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, y = itertools.count(1), 0
    for title, graphs in dashboard.rows:
        at = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {
            "id": next(number),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": at,
            "panels": [],
        }
        x, y = 0, y + 1
        for one in graphs:
            if x + one.width > WIDTH:
                x, y = 0, y + HEIGHT
            yield _panel(one, next(number), {"x": x, "y": y, "w": one.width, "h": HEIGHT})
            x += one.width
        y += HEIGHT


def _panel(one: Graph, number: int, at: dict[str, int]) -> dict[str, Any]:
    drawn = (
        {"stacking": {"mode": "normal"}, "fillOpacity": 30} if one.stacked else {"fillOpacity": 5}
    )
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.about,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {
            "defaults": {
                "unit": one.unit,
                **({"custom": drawn} if one.kind == "timeseries" else {}),
            },
            "overrides": [],
        },
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                **({"format": "table", "instant": True} if one.kind == "table" else {}),
            }
            for place, (legend, expression) in enumerate(one.series)
        ],
    }
