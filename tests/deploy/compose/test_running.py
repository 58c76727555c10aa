"""A mesh in containers: each is no more than it has to be, and none is missed when it is restarted.

The tests are in the order of a mesh's life: the last one takes it down.
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
def test_a_container_may_do_nothing_but_its_work(running: Project, service: str) -> None:
    said = running.inside(service, "cat", STATUS)
    state = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert state["Uid"].split()[0] != "0"
    assert {int(state[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Bnd")} == {0}
    assert state["NoNewPrivs"] == "1"
    assert state["Seccomp"] == "2"
    for place in ("/", "/opt", "/usr/local", "/etc"):
        assert "ead-only" in running.refused(service, "touch", f"{place}/x")


def test_bubblewrap_works_where_code_of_the_model_runs_and_nowhere_else(running: Project) -> None:
    assert "bwrap" in _isolation(running, "sandbox")
    assert "bwrap" not in _isolation(running, "workers")
    running.inside("sandbox", "meshrl", "run", CODE_JOB, "--dry-run", "--set", "out=/tmp/run")
    said = running.refused("workers", "meshrl", "run", CODE_JOB, "--dry-run")
    assert "bwrap" in said and "sandbox.tier" in said


def _isolation(running: Project, service: str) -> str:
    lines = running.inside(service, "meshrl", "doctor").splitlines()
    return next(line for line in lines if line.split()[1:2] == ["isolation"])


def test_prometheus_finds_every_host(running: Project) -> None:
    hosts = len(OURS) - 1 + running.workers
    running.until("Prometheus has asked all hosts", lambda: _up(running) == ["1"] * hosts)


def _up(running: Project) -> list[str]:
    asked = "http://127.0.0.1:9090/api/v1/query?query=up{job='meshrl'}"
    found = json.loads(running.inside("prometheus", "wget", "-q", "-O", "-", asked))
    return [sample["value"][1] for sample in found["data"]["result"]]


def test_a_person_with_a_token_hands_in_a_job_from_outside(
    running: Project, tmp_path: Path
) -> None:
    token = tmp_path / "submit.token"
    running.compose("cp", "demo:/secrets/submit/submit.token", str(token))
    token.chmod(0o600)
    named = ("--token", str(token))
    job = str(CODE / "examples/calculator.toml")
    words = [*running.demo.split()[1:], "--set", "name=outside", "--set", "budget.steps=2"]
    assert "outside" in running.outside(MESHRL, "submit", job, *words, *named)
    running.outside(MESHRL, "wait", "outside", "--timeout", str(scaled(250)), *named)
    assert "finished" in running.outside(MESHRL, "status", "outside", *named)


def test_a_run_loses_nothing_when_every_container_is_restarted(
    running: Project, figures: dict[str, Any]
) -> None:
    """Kill one container without notice and restart the others in order."""
    began = time.monotonic()
    jobs = running.restart_each()
    for name in jobs:
        running.until(f"{name} ends", partial(running.finished, name))
    figures["restarted_s"] = round(time.monotonic() - began)
    accounts = [running.account(name) for name in jobs]
    for name in ("lost", "trained_twice", "trained"):
        figures[name] = sum(account[name] for account in accounts)
    assert (figures["lost"], figures["trained_twice"]) == (0, 0)
    assert figures["trained"] > 0


def test_all_of_it_ends_in_order_and_in_time(running: Project, figures: dict[str, Any]) -> None:
    before = {name: running.containers(name) for name in ("redis", *OURS, "prometheus")}
    began = time.monotonic()
    running.compose("stop")
    figures["stop_s"] = round(time.monotonic() - began, 1)
    ended = {
        name: [running.inspected(one)["State"]["ExitCode"] for one in ids]
        for name, ids in before.items()
    }
    assert {code for codes in ended.values() for code in codes} == {0}, running.words()


def test_what_the_head_keeps_outlives_its_containers(running: Project) -> None:
    running.compose("down")
    running.up("head")
    running.until("the head answers", lambda: bool(running.job(DEMO)))
    assert running.job(DEMO)["phase"] == "finished"


@pytest.mark.parametrize("more", [(), ("gpu.yaml",), ("prod.yaml",)])
def test_compose_takes_each_overlay(
    engine: dict[str, str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    settings = {"MESHRL_SECRETS": str(tmp_path), "MESHRL_ADDRESS": "192.0.2.10"}
    Project(engine, settings=settings).compose("config", "--quiet", files=more)
