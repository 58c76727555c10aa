"""Mesh in containers: minimal rights of each container, and restarts without lost work.

The tests follow a mesh's lifetime: the last one removes it.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose.images.building import CODE
from tests.deploy.compose.project import DEMO, OURS, Project
from tests.load import scaled

pytestmark = [pytest.mark.needs("compose"), pytest.mark.timeout(1800)]
MESHRL = str(Path(sys.executable).with_name("meshrl"))
STATUS = "/proc/1/status"
CODE_JOB = "/usr/share/meshrl/examples/code.toml"


@pytest.mark.parametrize("service", [*OURS, "redis", "prometheus"])
def test_container_has_minimal_rights(running_project: Project, service: str) -> None:
    said = running_project.run_inside(service, "cat", STATUS)
    state = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert state["Uid"].split()[0] != "0"
    assert {int(state[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Bnd")} == {0}
    assert state["NoNewPrivs"] == "1"
    assert state["Seccomp"] == "2"
    for place in ("/", "/opt", "/usr/local", "/etc"):
        assert "ead-only" in running_project.run_rejected(service, "touch", f"{place}/x")


def test_bubblewrap_works_only_in_the_sandbox(running_project: Project) -> None:
    assert "bwrap" in _isolation(running_project, "sandbox")
    assert "bwrap" not in _isolation(running_project, "workers")
    running_project.run_inside(
        "sandbox", "meshrl", "run", CODE_JOB, "--dry-run", "--set", "out=/tmp/run"
    )
    said = running_project.run_rejected("workers", "meshrl", "run", CODE_JOB, "--dry-run")
    assert "bwrap" in said and "sandbox.tier" in said


def _isolation(running_project: Project, service: str) -> str:
    lines = running_project.run_inside(service, "meshrl", "doctor").splitlines()
    return next(line for line in lines if line.split()[1:2] == ["isolation"])


def test_prometheus_scrapes_every_host(running_project: Project) -> None:
    hosts = len(OURS) - 1 + running_project.workers
    running_project.until(
        "Prometheus has asked all hosts", lambda: list_up_values(running_project) == ["1"] * hosts
    )


def list_up_values(running_project: Project) -> list[str]:
    asked = "http://127.0.0.1:9090/api/v1/query?query=up{job='meshrl'}"
    found = json.loads(running_project.run_inside("prometheus", "wget", "-q", "-O", "-", asked))
    return [sample["value"][1] for sample in found["data"]["result"]]


def test_job_is_submitted_from_outside_with_a_token(
    running_project: Project, tmp_path: Path
) -> None:
    token = tmp_path / "submit.token"
    running_project.compose("cp", "demo:/secrets/submit/submit.token", str(token))
    token.chmod(0o600)
    named = ("--token", str(token))
    job = str(CODE / "examples/calculator.toml")
    words = [*running_project.demo.split()[1:], "--set", "name=outside", "--set", "budget.steps=2"]
    assert "outside" in running_project.run_outside(MESHRL, "submit", job, *words, *named)
    running_project.run_outside(MESHRL, "wait", "outside", "--timeout", str(scaled(250)), *named)
    assert "finished" in running_project.run_outside(MESHRL, "status", "outside", *named)


def test_run_loses_nothing_when_every_container_is_restarted(
    running_project: Project, figures: dict[str, Any]
) -> None:
    """Kill one container without notice and restart the others in order."""
    started_s = time.monotonic()
    jobs = running_project.restart_each()
    for name in jobs:
        running_project.until(f"{name} ends", partial(running_project.has_finished, name))
    figures["restarted_s"] = round(time.monotonic() - started_s)
    accounts = [running_project.read_accounting(name) for name in jobs]
    for name in ("lost", "trained_twice", "trained"):
        figures[name] = sum(account[name] for account in accounts)
    assert (figures["lost"], figures["trained_twice"]) == (0, 0)
    assert figures["trained"] > 0


def test_all_containers_stop_in_order_and_in_time(
    running_project: Project, figures: dict[str, Any]
) -> None:
    before = {name: running_project.containers(name) for name in ("redis", *OURS, "prometheus")}
    started_s = time.monotonic()
    running_project.compose("stop")
    figures["stop_s"] = round(time.monotonic() - started_s, 1)
    ended = {
        name: [running_project.inspect(one)["State"]["ExitCode"] for one in ids]
        for name, ids in before.items()
    }
    assert {code for codes in ended.values() for code in codes} == {0}, (
        running_project.format_logs()
    )


def test_state_of_the_head_outlives_its_containers(running_project: Project) -> None:
    running_project.compose("down")
    running_project.up("head")
    running_project.until("the head answers", lambda: bool(running_project.job(DEMO)))
    assert running_project.job(DEMO)["phase"] == "finished"


@pytest.mark.parametrize("more", [(), ("gpu.yaml",), ("prod.yaml",)])
def test_compose_accepts_each_overlay(
    engine: dict[str, str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    settings = {"MESHRL_SECRETS": str(tmp_path), "MESHRL_ADDRESS": "192.0.2.10"}
    Project(engine, settings=settings).compose("config", "--quiet", files=more)
