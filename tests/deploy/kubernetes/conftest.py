"""Rendered objects, shared by all tests."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes import rendering
from tests.deploy.kubernetes.rendering import Object


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """Return the objects of each overlay by its name; `submit` is the Job."""
    directory = tmp_path_factory.mktemp("kustomize") / "kubernetes"
    return rendering.render_all(rendering.copy_overlays(directory))


@pytest.fixture(params=rendering.OVERLAYS)
def overlay(request: pytest.FixtureRequest, objects: dict[str, list[Object]]) -> list[Object]:
    """Return the objects of one overlay, with the Job of the same namespace."""
    return objects[request.param] + objects["submit"]
