"""Grafana's files fit together, and Prometheus can parse all that the dashboards ask it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loadtests.monitoring.files import GRAFANA, alerts, dashboards, expressions, metrics, read
from tests.deploy.monitoring.promtool import promtool


def test_the_dashboards_are_what_their_program_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", GRAFANA / "dashboards.py", tmp_path], check=True)
    made = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert made == dashboards()


def test_every_panel_asks_the_data_source_that_is_provisioned() -> None:
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    for dashboard in dashboards().values():
        asked = [p for p in dashboard["panels"] if p["type"] != "row"]
        asked += [t for panel in asked for t in panel["targets"]]
        asked += dashboard["templating"]["list"]
        assert {a["datasource"]["uid"] for a in asked} == {source["uid"]}


def test_panels_are_told_apart_and_none_covers_another() -> None:
    uids = [dashboard["uid"] for dashboard in dashboards().values()]
    assert len(set(uids)) == len(uids) == 3
    for dashboard in dashboards().values():
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for at in (panel["gridPos"] for panel in panels):
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert at["x"] + at["w"] <= 24
            assert not cells & taken
            taken |= cells


def test_variables_that_expressions_name_are_chosen_at_the_top() -> None:
    for dashboard in dashboards().values():
        named = set(
            re.findall(r"\$(\w+)", json.dumps([p.get("targets") for p in dashboard["panels"]]))
        )
        assert named == {variable["name"] for variable in dashboard["templating"]["list"]}


def test_the_provider_reads_where_the_dashboards_are_mounted() -> None:
    (provider,) = read(GRAFANA / "provisioning/dashboards/meshrl.yaml")["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


@pytest.mark.needs("promtool")
def test_prometheus_can_parse_what_every_panel_asks(tmp_path: Path) -> None:
    asked = [e for dashboard in dashboards().values() for e in expressions(dashboard)]
    assert len(asked) > 40
    rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(asked)]
    told = {"groups": [{"name": "panels", "rules": rules}]}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump(told))
    assert f"{len(asked)} rules found" in promtool("check", "rules", "panels.yaml", cwd=tmp_path)


def test_names_of_series_are_found_in_an_expression() -> None:
    told = 'sum by (job) (rate(meshrl_tokens{job="meshrl_no"}[5m])) / up{role="head"}'
    assert metrics(told) == {"meshrl_tokens", "up"}
    assert metrics(alerts()["MeshHeadDown"]["expr"]) == {"up"}
