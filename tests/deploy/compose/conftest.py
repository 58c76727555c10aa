"""One project for all tests of compose/, on an engine that runs or on one of our own."""

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
    """What was measured: printed at the end, as one line of JSON."""
    return pytestconfig.stash.setdefault(FIGURES, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if found := config.stash.get(FIGURES, {}):
        terminalreporter.write_line(json.dumps(found))


@pytest.fixture(scope="session")
def engine(figures: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The variables of an engine that has all images. $BASE names what they are made from, where a
    registry is reached; else that is a Debian of our own. MESHRL_TEST_IMAGES=keep takes those that
    were built before.
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
        ours.stop()  # only what `start` has started


@pytest.fixture(scope="session")
def running(engine: dict[str, str], figures: dict[str, Any]) -> Iterator[Project]:
    """The project, whose demo is in training."""
    mesh = Project(engine, demo=project.short(STEPS))
    mesh.down()
    try:
        began = mesh.up()
        mesh.until("the demo trains", lambda: mesh.trains(project.DEMO))
        figures["compose_up_s"] = began()
        yield mesh
    finally:
        mesh.down()
