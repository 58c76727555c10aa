"""Fixtures of compose/: one project for all tests, on a running engine or one of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.compose import project
from tests.deploy.compose.images.building import OURS, build_stand_ins, serve_packages
from tests.deploy.compose.project import Project
from tests.deploy.engine import base
from tests.deploy.engine.daemon import Engine

STEPS = 100
FIGURES = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Return the measured figures, which are printed at the end as one line of JSON."""
    return pytestconfig.stash.setdefault(FIGURES, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if found := config.stash.get(FIGURES, {}):
        terminalreporter.write_line(json.dumps(found))


@pytest.fixture(scope="session")
def engine(figures: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Provide an engine with stand-ins for official images; yield its environment variables.

    BASE_IMAGE names the base image where a registry is reachable. Otherwise one is built.
    """
    ours = Engine(project.state_folder())
    found = project.engine_here()
    if found is None:
        ours.start()
        found = ours.variables()
    try:
        found["BASE_IMAGE"] = os.environ.get("BASE_IMAGE") or base.make(found)
        build_stand_ins(found, found["BASE_IMAGE"])
        yield found
    finally:
        ours.stop()  # only the engine that `start` has started


@pytest.fixture(scope="session")
def running_project(engine: dict[str, str], figures: dict[str, Any]) -> Iterator[Project]:
    """Provide the project while its demo job trains, started as a fresh clone is."""
    mesh = Project(engine, demo=project.make_short_demo(STEPS))
    mesh.remove()
    try:
        with serve_packages(engine) as variables:
            began = mesh.up(build=variables)
        figures["compose_up_s"] = began()
        figures["image_mb"] = mesh.image_mb(OURS)
        mesh.until("the demo trains", lambda: mesh.has_trained(project.DEMO))
        figures["compose_trains_s"] = began()
        yield mesh
    finally:
        mesh.remove()
