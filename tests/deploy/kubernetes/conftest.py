"""The objects that are looked at, rendered once."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes import rendering
from tests.deploy.kubernetes.rendering import Object


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """Those of each overlay, by its name; `submit` is the Job."""
    directory = tmp_path_factory.mktemp("kustomize") / "kubernetes"
    return rendering.everything(rendering.copied(directory))


@pytest.fixture(params=rendering.OVERLAYS)
def overlay(request: pytest.FixtureRequest, objects: dict[str, list[Object]]) -> list[Object]:
    """Those of one overlay, with the Job, which is in the same namespace."""
    return objects[request.param] + objects["submit"]
