"""Configuration of Prometheus and Grafana: targets, rules, alerts and dashboards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.monitoring.files import (
    GRAFANA,
    PROMETHEUS,
    alerts,
    dashboards,
    expressions,
    metrics,
    read,
)
from tests.deploy.monitoring.promtool import run_promtool

ROOT = Path(__file__).parents[3]
CONFIGURATIONS = ("prometheus.yaml", "kubernetes.yaml")


def _read_scrape_job(name: str) -> dict[str, Any]:
    """Return the job of a configuration that scrapes the mesh."""
    job: dict[str, Any]
    (job,) = [j for j in read(PROMETHEUS / name)["scrape_configs"] if j["job_name"] == "meshrl"]
    return job


def _relabel_targets(
    tmp_path: Path, job: dict[str, Any], groups: list[dict[str, Any]]
) -> list[Any]:
    """Return the labels of the targets that Prometheus makes from a discovery's results."""
    (tmp_path / "found.json").write_text(json.dumps(groups))
    kept = {key: value for key, value in job.items() if not key.endswith("_sd_configs")}
    kept.pop("static_configs", None)
    told = kept | {"file_sd_configs": [{"files": ["found.json"]}]}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({"scrape_configs": [told]}))
    said = run_promtool(
        "check", "service-discovery", "--timeout=1s", "p.yaml", "meshrl", cwd=tmp_path
    )
    return [target["labels"] for target in json.loads(said) if target.get("labels")]


@pytest.mark.needs("promtool")
def test_prometheus_accepts_configuration_and_rules() -> None:
    run_promtool("check", "config", "prometheus.yaml")
    run_promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")


@pytest.mark.rotating(2)
@pytest.mark.needs("promtool")
def test_alerts_fire_only_under_their_conditions() -> None:
    run_promtool("test", "rules", "alerts_test.yaml")


def test_each_alert_is_tested_firing_and_silent() -> None:
    tried = [
        one
        for test in read(PROMETHEUS / "alerts_test.yaml")["tests"]
        for one in test["alert_rule_test"]
    ]
    fire = {one["alertname"] for one in tried if one.get("exp_alerts")}
    silent = {one["alertname"] for one in tried if not one.get("exp_alerts")}
    assert fire == silent == set(alerts())


@pytest.mark.parametrize("name", sorted(alerts()))
def test_alert_has_severity_action_and_runbook(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.search(
        r"`meshrl |Free disk space|Look |Start |algorithm\.", rule["annotations"]["summary"]
    )
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    titles = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.M)
    assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_labels_of_the_mesh_are_kept(name: str) -> None:
    assert _read_scrape_job(name)["honor_labels"] is True
    assert read(PROMETHEUS / name)["rule_files"] == ["alerts.yaml"]


@pytest.mark.needs("promtool")
def test_host_found_by_dns_has_the_role_of_its_name(tmp_path: Path) -> None:
    job = _read_scrape_job("prometheus.yaml")
    assert job["static_configs"] == [{"targets": ["head:9400"], "labels": {"role": "head"}}]
    (target,) = _relabel_targets(
        tmp_path, job, [{"targets": ["10.0.0.7:9400"], "labels": {"__meta_dns_name": "workers"}}]
    )
    assert target["instance"] == "10.0.0.7:9400"
    assert target["role"] == "workers"
    assert target["__metrics_path__"] == "/metrics"


@pytest.mark.needs("promtool")
def test_only_annotated_pods_are_scraped_at_the_annotated_port(tmp_path: Path) -> None:
    def pod(address: str, port: str, **meta: str) -> dict[str, Any]:
        named = {f"__meta_kubernetes_{k}": v for k, v in meta.items()}
        labels = named | {"__meta_kubernetes_pod_ip": address}
        return {"targets": [f"{address}:{port}"], "labels": labels}

    asks = {
        "pod_annotation_prometheus_io_scrape": "true",
        "pod_annotation_prometheus_io_port": "9400",
        "pod_annotation_prometheus_io_path": "/metrics",
        "pod_label_app_kubernetes_io_component": "head",
        "pod_name": "meshrl-head-0",
        "pod_phase": "Running",
        "namespace": "meshrl",
    }
    found = _relabel_targets(
        tmp_path,
        _read_scrape_job("kubernetes.yaml"),
        [
            pod("10.1.0.5", "7199", **asks),
            pod("10.1.0.5", "6379", **asks),  # another port of the same pod
            pod("10.1.0.6", "9400", **asks | {"pod_phase": "Succeeded"}),
            pod("10.1.0.8", "8080", pod_name="another", pod_phase="Running"),
        ],
    )
    assert {target["__address__"] for target in found} == {"10.1.0.5:9400"}
    assert found[0]["role"] == "head"
    assert found[0]["pod"] == "meshrl-head-0"
    assert all(target == found[0] for target in found)  # targets with equal labels are one target


def test_dashboards_match_their_generator(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", GRAFANA / "dashboards.py", tmp_path], check=True)
    made = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert made == dashboards()


def test_panels_use_the_provisioned_data_source() -> None:
    (source,) = read(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    for dashboard in dashboards().values():
        asked = [p for p in dashboard["panels"] if p["type"] != "row"]
        asked += [t for panel in asked for t in panel["targets"]]
        asked += dashboard["templating"]["list"]
        assert {a["datasource"]["uid"] for a in asked} == {source["uid"]}


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
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


def test_variables_in_expressions_are_selectable() -> None:
    for dashboard in dashboards().values():
        named = set(
            re.findall(r"\$(\w+)", json.dumps([p.get("targets") for p in dashboard["panels"]]))
        )
        assert named == {variable["name"] for variable in dashboard["templating"]["list"]}


def test_provider_path_matches_the_mount() -> None:
    (provider,) = read(GRAFANA / "provisioning/dashboards/meshrl.yaml")["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


@pytest.mark.needs("promtool")
def test_prometheus_parses_every_panel_expression(tmp_path: Path) -> None:
    asked = [e for dashboard in dashboards().values() for e in expressions(dashboard)]
    assert len(asked) > 40
    rules = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(asked)]
    told = {"groups": [{"name": "panels", "rules": rules}]}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump(told))
    assert f"{len(asked)} rules found" in run_promtool(
        "check", "rules", "panels.yaml", cwd=tmp_path
    )


def test_metric_names_are_extracted_from_expressions() -> None:
    told = 'sum by (job) (rate(meshrl_tokens{job="meshrl_no"}[5m])) / up{role="head"}'
    assert metrics(told) == {"meshrl_tokens", "up"}
    assert metrics(alerts()["MeshHeadDown"]["expr"]) == {"up"}
