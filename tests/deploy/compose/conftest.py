"""Fixtures of compose/: one project for all tests, on a running engine or one of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.compose import project
from tests.deploy.compose.images.building import IMAGES, build
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
    """Provide an engine with all images; yield its environment variables.

    If $BASE is set (a registry is reachable), it names the base image. Otherwise a Debian image is
    built. MESHRL_TEST_IMAGES=keep reuses existing images.
    """
    ours = Engine(project.state_folder())
    found = project.engine_here()
    if found is None:
        ours.start()
        found = ours.variables()
    try:
        if os.environ.get("MESHRL_TEST_IMAGES") != "keep":
            build(found, os.environ.get("BASE") or base.make(found))
        figures["image_mb"] = {name: Project(found).image_mb(name) for name in IMAGES}
        yield found
    finally:
        ours.stop()  # only the engine that `start` has started


@pytest.fixture(scope="session")
def running_project(engine: dict[str, str], figures: dict[str, Any]) -> Iterator[Project]:
    """Provide the project while its demo job trains."""
    mesh = Project(engine, demo=project.make_short_demo(STEPS))
    mesh.remove()
    try:
        began = mesh.up()
        mesh.until("the demo trains", lambda: mesh.has_trained(project.DEMO))
        figures["compose_up_s"] = began()
        yield mesh
    finally:
        mesh.remove()
