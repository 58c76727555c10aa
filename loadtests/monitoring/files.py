"""Contents of compose/monitoring: the alerts, the dashboards, and the series that they read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[2] / "compose" / "monitoring"
PROMETHEUS = MONITORING / "prometheus"
GRAFANA = MONITORING / "grafana"
METRIC = re.compile(r"\b(?:meshrl|process)_\w+|\bup\b(?=\s*[{=])")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def alerts() -> dict[str, dict[str, Any]]:
    groups = read(PROMETHEUS / "alerts.yaml")["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboards() -> dict[str, dict[str, Any]]:
    found = sorted((GRAFANA / "dashboards").glob("*.json"))
    return {path.name: json.loads(path.read_text()) for path in found}


def expressions(dashboard: dict[str, Any], job: str = "calc") -> list[str]:
    """Return the expressions of a dashboard's panels, with one job and every service selected."""
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", [])]
    return [t["expr"].replace("$job", job).replace("$service", ".*") for t in targets]


def metrics(expression: str) -> set[str]:
    """Return the names of the series that an expression reads, without those matched by a
    pattern.
    """
    named = re.sub(r'"[^"]*"', '""', expression)
    return set(METRIC.findall(named))
